"""Parse what a sweep varies: one field, or several fields whose values belong together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from fedcover.runs.sweep import Choices
from fedcover.runs.toml_fields import parse_change

FIELDS = {*Experiment.model_fields, "preset"}


def choices_of(texts: Sequence[str]) -> Choices:
    """Return the choices of several `--vary` options. Each field may be in one of them only.

    >>> choices_of(["lr=0.1|0.2"])
    {('lr',): [(0.1,), (0.2,)]}
    >>> choices_of(["policy=prefix,norm=batch|policy=rolling,norm=group"])
    {('policy', 'norm'): [('prefix', 'batch'), ('rolling', 'group')]}
    """
    choices = [_parse_choice(text) for text in texts]
    num_uses = Counter(key for keys, _ in choices for key in keys)
    for key, number in num_uses.items():
        if number > 1:
            raise InvalidValue(
                f"vary must name each field once, with all its values: {key}=...|...;"
                f" got {number} of {key}"
            )
    return dict(choices)


def _parse_choice(text: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return the fields of one option, and their values in each setting."""
    first, *others = _split(text, "|")
    key, equals, value = first.partition("=")
    if not equals or not value:
        raise InvalidValue(f"vary must look like key=value|value, or a=1,b=2|a=3,b=4; got {text!r}")
    has_one_field = len(_assignments(first)) == 1
    if has_one_field and not any(_is_assignment(other) for other in others):
        return (key,), [(parse_change(f"{key}={word}")[1],) for word in (value, *others)]
    return _parse_settings([first, *others])


def _parse_settings(texts: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    keys: tuple[str, ...] = ()
    values: list[tuple[Any, ...]] = []
    for text in texts:
        assignments = [word for word in _assignments(text) if _is_assignment(word)]
        setting = dict(parse_change(assignment) for assignment in assignments)
        keys = keys or tuple(setting)
        if setting.keys() != set(keys):
            raise InvalidValue(
                f"vary must give all of {', '.join(keys)} in each setting; got {text!r}"
            )
        values.append(tuple(setting[key] for key in keys))
    return keys, values


def _assignments(text: str) -> list[str]:
    """Return the assignments of a setting. A comma may also be part of a value."""
    assignments: list[str] = []
    for piece in _split(text, ","):
        if assignments and not _is_assignment(piece):
            assignments[-1] += f",{piece}"
        else:
            assignments.append(piece)
    return assignments


def _is_assignment(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.strip() in FIELDS


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the pieces between separators, except those inside brackets or quotes."""
    depth, quote, start = 0, "", 0
    for position, character in enumerate(text):
        if quote:
            if character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character == separator and not depth:
            yield text[start:position]
            start = position + 1
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
    yield text[start:]
