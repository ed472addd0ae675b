"""Who decides which functions are called: the caller, never a file from elsewhere.

An experiment may name `package.module:function`, which is imported and called. By making an
`Experiment`, or starting one from a TOML file, the caller trusts the functions it names. A run
folder or an exported model may come from anybody. Its functions are called only if this process
already trusts them, or if the caller asks for that with `trust`.
"""

from collections.abc import Mapping
from typing import Any

from fedcover.errors import RunError
from fedcover.registry import POSITIONAL_ARGUMENTS, is_import_path

_trusted: set[tuple[str, str]] = set()
"""Trusted fields and their texts.

A text includes the options, so trusting `f(a=1)` does not trust `f(a=2)`.
"""


def custom_functions(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of an experiment that name a function by its import path.

    >>> custom_functions({"policy": "mine:policy(spread=true)", "model": "mlp", "rounds": 3})
    {'policy': 'mine:policy(spread=true)'}
    """
    functions = {}
    for field in POSITIONAL_ARGUMENTS:
        text = fields.get(field)
        if isinstance(text, str) and is_import_path(text):
            functions[field] = text
    return functions


def trust_fields(fields: Mapping[str, Any]) -> None:
    """Trust the functions that the caller has named."""
    _trusted.update(custom_functions(fields).items())


def all_trusted(fields: Mapping[str, Any]) -> bool:
    """Return whether the caller has named every function in these fields."""
    return custom_functions(fields).items() <= _trusted


def check_trusted(source: object, fields: Mapping[str, Any]) -> None:
    """Raise if the fields name a function that the caller has not named.

    >>> check_trusted("runs/theirs", {"model": "theirs:build"})
    Traceback (most recent call last):
    ...
    fedcover.errors.RunError: runs/theirs would have 'theirs:build' imported and called as its \
model: if you trust where it comes from, say so with --trust, or trust=True in Python
    """
    for field, text in custom_functions(fields).items():
        if (field, text) not in _trusted:
            raise RunError(
                f"{source} would have {text!r} imported and called as its {field}: if you trust "
                "where it comes from, say so with --trust, or trust=True in Python"
            )
