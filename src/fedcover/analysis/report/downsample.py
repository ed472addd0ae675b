"""Keeping the page small: curves of at most so many points, pictures of as many rounds as there is room for."""

import base64
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fedcover.analysis.report.load import MetricsLine

CURVES_MAX_BYTES, MAX_POINTS, CURVE_COLUMNS, CHARACTERS_PER_VALUE = 800_000, 400, 16, 7
MAPS_MAX_BYTES, RUN_MAPS_MAX_BYTES = 1_700_000, 400_000
"""Bytes of the page for all curves and for all pictures, and for the pictures of one run."""
MAX_ENDS = 20
"""At how many last rounds of other seeds a curve has a point."""
SIZE_PROBE_ROUNDS = 24
"""Rounds from which it is told how many would fit."""


def points_for(runs: int) -> int:
    """How many points a curve may have when so many runs share the page.

    >>> points_for(1), points_for(50)
    (400, 142)
    """
    return max(
        20, min(MAX_POINTS, CURVES_MAX_BYTES // (runs * CURVE_COLUMNS * CHARACTERS_PER_VALUE))
    )


def evenly_spaced(number: int, most: int) -> list[int]:
    """At most so many places out of 0..number-1, evenly, the first and the last among them.

    >>> evenly_spaced(5, 10), evenly_spaced(9, 3)
    ([0, 1, 2, 3, 4], [0, 4, 8])
    """
    if number <= most:
        return list(range(number))
    return (
        [place * (number - 1) // (most - 1) for place in range(most)] if most > 1 else [number - 1]
    )


def sample_ends(rounds: Iterable[int]) -> frozenset[int]:
    """Of the last rounds of a group's runs so many that a page of many seeds stays small, the last among them."""
    known = sorted(set(rounds))
    return frozenset(known[place] for place in evenly_spaced(len(known), MAX_ENDS))


def lowest(values: Sequence[Any]) -> Any:
    """The lowest of the values of neighbouring rounds: a curve of minima must not lose one."""
    known = [value for value in values if value is not None]
    return min(known, default=None)


def last_value(values: Sequence[Any]) -> Any:
    """The last of the values of neighbouring rounds."""
    return values[-1]


def downsample_columns(
    columns: dict[str, list[Any]],
    planned: int,
    most: int,
    keep: Mapping[str, Callable[[Sequence[Any]], Any]],
    ends: Collection[int] = (),
) -> dict[str, list[Any]]:
    """Columns of equal length cut down; `keep` says what stands for the places left out before each.

    The first and the last place stay, and else what depends only on the `planned` length and on the rounds `ends` in
    which runs of the group ended, so that a run which stopped can be averaged with others.
    """
    rounds, stride = columns["round"], -(-planned // most)
    chosen = [
        place
        for place, round in enumerate(rounds)
        if (place + 1) % stride == 0 or place in (0, len(rounds) - 1) or round in ends
    ]
    starts = [0, *(place + 1 for place in chosen)][: len(chosen)]
    return {
        name: [
            compact_number(keep.get(name, last_value)(column[a : b + 1]))
            for a, b in zip(starts, chosen, strict=True)
        ]
        for name, column in columns.items()
    }


def compact_number(value: Any) -> Any:
    """A number with five digits; what is no number is nothing.

    >>> compact_number(0.123456789), compact_number(float("nan")), compact_number(12), compact_number(2.0)
    (0.12346, None, 12, 2)
    """
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def pack_coverage_maps(lines: Sequence[MetricsLine], runs: int) -> str | None:
    """The pictures of as many rounds as fit, evenly chosen, deflated; None if the run has none."""
    frames = [
        {
            "round": line["round"] + 1,
            "capacities": {
                client: line["clients"][client]["capacity"]
                for client in line["pictures"]["clients"]
            },
            "answered": len(line["clients"]),
            **line["pictures"],
        }
        for line in lines
        if line.get("pictures")
    ]
    if not frames:
        return None
    budget, sample = (
        min(RUN_MAPS_MAX_BYTES, MAPS_MAX_BYTES // runs),
        evenly_spaced(len(frames), SIZE_PROBE_ROUNDS),
    )
    most = min(
        len(frames), len(sample) * budget // len(_packed([frames[place] for place in sample]))
    )
    while most:
        packed = _packed([frames[place] for place in evenly_spaced(len(frames), most)])
        if len(packed) <= budget:
            return packed
        most = most * 9 // 10
    return None


def _packed(frames: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(_hoist_layers(frames)).encode(), 6)).decode()


def _hoist_layers(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """The layers are the same in every round, so they are told once."""
    return {
        "layers": frames[0]["layers"],
        "frames": [
            {key: value for key, value in frame.items() if key != "layers"} for frame in frames
        ],
    }
