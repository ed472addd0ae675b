"""Check the settings in a run's file, as far as a page needs them. The file is not trusted."""

from collections.abc import Mapping
from typing import Any

from fedcover.errors import RunError

INTEGER_RANGES = {"rounds": (1, 10**9), "evaluate_every": (1, 10**9), "seed": (0, 2**63 - 1)}
"""The smallest and largest value of the settings that the page computes with."""


def check_settings(where: object, settings: Mapping[str, Any]) -> None:
    """Check that settings are those of an experiment.

    Raises:
        RunError: names the setting and its value.

    >>> check_settings("run/experiment.toml", {"rounds": 0})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcover.errors.RunError: run/experiment.toml cannot be read: rounds must be ...; got 0
    """
    for name, value in settings.items():
        if not _is_plain(value) and not _is_plain_list(value):
            raise RunError(
                f"{where} cannot be read:"
                f" {name!r:.100} must be a text, a number, a truth value or a list"
            )
    for name, (least, most) in INTEGER_RANGES.items():
        value = settings.get(name, least)
        if type(value) is not int or not least <= value <= most:
            raise RunError(
                f"{where} cannot be read:"
                f" {name} must be a whole number in {least}..{most}; got {value!r:.100}"
            )
    fleet = settings.get("fleet", "1x1.0")
    if not _is_fleet(fleet):
        raise RunError(
            f"{where} cannot be read: fleet must look like '4x1.0 + 6x0.5'; got {fleet!r:.100}"
        )


def _is_fleet(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return all(0 < capacity <= 1 for capacity in devices_by_capacity(value))
    except ValueError:
        return False


def _is_plain(value: object) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**64)


def _is_plain_list(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_plain, value))


def devices_by_capacity(fleet: str) -> dict[float, int]:
    """Return the number of devices of each capacity.

    >>> devices_by_capacity("4x1 + 6x0.75")
    {1.0: 4, 0.75: 6}
    """
    devices: dict[float, int] = {}
    for term in fleet.split("+"):
        number, _, capacity = term.partition("x")
        devices[float(capacity)] = devices.get(float(capacity), 0) + int(number)
    return devices
