"""Define the errors: every message names the field, the value and what is allowed.

FedcoverError
├── InvalidValue      the user's input is wrong (exit code 2)
├── DataError         a data set is missing, truncated or altered
├── RunError          a run folder or a checkpoint cannot be used
└── TrainingDiverged  a client's loss or weights are not finite
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FedcoverError(Exception):
    """Base class of the errors that are reported to the user in one sentence."""


class InvalidValue(FedcoverError, ValueError):
    """Raised for an input value that is not allowed."""


class DataError(FedcoverError):
    """Raised for a data set that is missing, unreadable or altered."""


class RunError(FedcoverError):
    """Raised for a run folder or checkpoint that cannot be written, read or resumed."""


class TrainingDiverged(FedcoverError):
    """Raised when local training produces a number that is not finite."""


_ERRORS = {
    error.__name__: error
    for error in (FedcoverError, InvalidValue, DataError, RunError, TrainingDiverged)
}


def error_named(class_name: str, message: str) -> FedcoverError:
    """Create the error that another process has reported; a `RunError` for any other class.

    >>> error_named("DataError", "it is truncated"), error_named("MemoryError", "too much")
    (DataError('it is truncated'), RunError('too much'))
    """
    return _ERRORS.get(class_name, RunError)(message)


def unknown(field: str, value: object, allowed: Iterable[object]) -> InvalidValue:
    """Create the error for an unknown name, with the closest known one as a hint.

    >>> print(unknown("policy", "rollin", ["prefix", "rolling"]))
    policy must be one of prefix, rolling; got 'rollin' (did you mean 'rolling'?)
    """
    names = [str(name) for name in allowed]
    close_names = get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close_names[0]!r}?)" if close_names else ""
    return InvalidValue(f"{field} must be one of {', '.join(names)}; got {value!r}{hint}")


def printable(text: str) -> str:
    """Replace control characters, so that foreign text cannot control the terminal.

    >>> printable("grün\\x1b[2J")
    'grün?[2J'
    """
    return "".join(character if character.isprintable() else "?" for character in text)
