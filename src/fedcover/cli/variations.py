"""What a sweep varies, as it is typed: one field, or several whose values belong together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from fedcover.runs.sweep import Choices
from fedcover.runs.toml_fields import parse_change

FIELDS = {*Experiment.model_fields, "preset"}


def choices_of(texts: Sequence[str]) -> Choices:
    """The choices of several `--vary`; no field may be in two of them.

    >>> choices_of(["lr=0.1|0.2"])
    {('lr',): [(0.1,), (0.2,)]}
    >>> choices_of(["policy=prefix,norm=batch|policy=rolling,norm=group"])
    {('policy', 'norm'): [('prefix', 'batch'), ('rolling', 'group')]}
    """
    choices = [_choice(text) for text in texts]
    for key, number in Counter(key for keys, _ in choices for key in keys).items():
        if number > 1:
            raise InvalidValue(
                f"vary must name each field once, with all its values: {key}=...|...; got {number} of {key}"
            )
    return dict(choices)


def _choice(text: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    first, *rest = _split(text, "|")
    key, equals, value = first.partition("=")
    if not equals or not value:
        raise InvalidValue(f"vary must look like key=value|value, or a=1,b=2|a=3,b=4; got {text!r}")
    if len(_assignments(first)) == 1 and not any(_is_assignment(each) for each in rest):
        return (key,), [(parse_change(f"{key}={value}")[1],) for value in (value, *rest)]
    settings = [
        dict(map(parse_change, filter(_is_assignment, _assignments(each))))
        for each in (first, *rest)
    ]
    keys = tuple(settings[0])
    for each, setting in zip((first, *rest), settings, strict=True):
        if setting.keys() != settings[0].keys():
            raise InvalidValue(
                f"vary must give all of {', '.join(keys)} in each setting; got {each!r}"
            )
    return keys, [tuple(setting[key] for key in keys) for setting in settings]


def _assignments(text: str) -> list[str]:
    """The parts of a setting; a comma may also be in a value."""
    parts: list[str] = []
    for piece in _split(text, ","):
        if parts and not _is_assignment(piece):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _is_assignment(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(equals) and name.strip() in FIELDS


def _split(text: str, sign: str) -> Iterator[str]:
    """The pieces between signs that are in no bracket and no quotes."""
    depth, quote, start = 0, "", 0
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == sign and not depth:
            yield text[start:place]
            start = place + 1
        else:
            depth += (character in "([{") - (character in ")]}")
    yield text[start:]
