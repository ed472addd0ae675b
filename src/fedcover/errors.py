"""What can go wrong, as one small tree: every message names the thing, the value and what is allowed.

FedcoverError
├── InvalidValue      the user's input is wrong (exit code 2)
├── DataError         a data set is missing, truncated or altered
├── RunError          a run folder or a checkpoint cannot be used
└── TrainingDiverged  a client's training left the finite numbers
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FedcoverError(Exception):
    """Anything that fedcover reports to its user in one sentence."""


class InvalidValue(FedcoverError, ValueError):
    """An input value that is not allowed."""


class DataError(FedcoverError):
    """A data set that is not there, or not what its publisher published."""


class RunError(FedcoverError):
    """A run folder or checkpoint that cannot be written, read or continued."""


class TrainingDiverged(FedcoverError):
    """Local training produced a number that is not finite."""


def unknown(field: str, value: object, allowed: Iterable[object]) -> InvalidValue:
    """The error for a name that is in no table.

    >>> print(unknown("policy", "rollin", ["prefix", "rolling"]))
    policy must be one of prefix, rolling; got 'rollin' (did you mean 'rolling'?)
    """
    names = [str(name) for name in allowed]
    close = get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return InvalidValue(f"{field} must be one of {', '.join(names)}; got {value!r}{hint}")


def printable(text: str) -> str:
    """A text from elsewhere without anything that a terminal would obey.

    >>> printable("grün\\x1b[2J")
    'grün?[2J'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)
