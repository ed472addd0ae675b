"""Who may choose what is called: the caller names functions, a file from elsewhere does not.

An experiment may name `package.module:function`, which is imported and called. Whoever makes an `Experiment` in this
process, or starts one from a TOML file, chooses what it names. A run folder or an exported model may come from anybody:
what it names is called only if this process has chosen the same before, or if the caller says that it is trusted.
"""

from collections.abc import Mapping
from typing import Any

from fedcover.errors import RunError
from fedcover.registry import POSITIONAL_ARGUMENTS, is_import_path

_trusted: set[tuple[str, str]] = set()
"""The fields and texts that this process was told to call; a text has the options in it, so it stands for one call."""


def custom_functions(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an experiment that name a function of some module, rather than one of a table.

    >>> custom_functions({"policy": "mine:policy(spread=true)", "model": "mlp", "rounds": 3})
    {'policy': 'mine:policy(spread=true)'}
    """
    texts = {
        field: fields[field] for field in POSITIONAL_ARGUMENTS if isinstance(fields.get(field), str)
    }
    return {field: text for field, text in texts.items() if is_import_path(text)}


def trust_fields(fields: Mapping[str, Any]) -> None:
    """Note what the caller has named."""
    _trusted.update(custom_functions(fields).items())


def all_trusted(fields: Mapping[str, Any]) -> bool:
    """Whether the caller has named every function that these fields name."""
    return custom_functions(fields).items() <= _trusted


def check_trusted(where: object, fields: Mapping[str, Any]) -> None:
    """Refuse what names a function that the caller has not named.

    >>> check_trusted("runs/theirs", {"model": "theirs:build"})
    Traceback (most recent call last):
    ...
    fedcover.errors.RunError: runs/theirs would have 'theirs:build' imported and called as its model: if you trust \
where it comes from, say so with --trust, or trust=True in Python
    """
    for field, text in custom_functions(fields).items():
        if (field, text) not in _trusted:
            raise RunError(
                f"{where} would have {text!r} imported and called as its {field}: if you trust where it comes from, "
                "say so with --trust, or trust=True in Python"
            )
