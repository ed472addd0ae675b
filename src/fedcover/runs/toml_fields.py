"""Read the fields of an experiment from TOML; nothing is checked or imported here."""

import re
import tomllib
from pathlib import Path
from typing import Any

from fedcover.errors import InvalidValue
from fedcover.host import disk


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the experiment is not valid TOML: {error}") from error


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields in a TOML file; without a `name`, they get the file's."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"experiment {path} cannot be read: {disk.reason(error)}") from error
    return parse_fields(text, path.stem)


def parse_fields(text: str, default_name: str) -> dict[str, Any]:
    """Parse the fields in a TOML text; without a `name`, they get the default one."""
    return {"name": valid_name(default_name), **parse_toml(text)}


def valid_name(text: str) -> str:
    """Return the most similar name that a run can have.

    >>> valid_name("my exp (2)"), valid_name("€")
    ('my-exp-2', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or "run"


def parse_change(text: str) -> tuple[str, Any]:
    """Parse the argument of `--set key=value`.

    The value is read as TOML if it is a plain TOML value, otherwise as a string.

    >>> parse_change("rounds=50"), parse_change("scaler=true")
    (('rounds', 50), ('scaler', True))
    >>> parse_change("policy=rolling(spread=true)")
    ('policy', 'rolling(spread=true)')
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidValue(f"--set must look like key=value; got {text!r}")
    try:
        document = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        document = {}
    # a value with a line break could add fields of its own
    if len(document) == 1 and isinstance(document["value"], bool | int | float | str | list):
        return key.strip(), document["value"]
    return key.strip(), value.strip()
