"""Keep the page small: limit the points of curves and the rounds of coverage maps."""

import base64
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from fedcover.analysis.report.load import MetricsLine

CURVES_MAX_BYTES = 800_000
"""Bytes of the page for the curves of all runs."""
CURVE_COLUMNS = 16
CHARACTERS_PER_VALUE = 7
MAX_POINTS = 400
MIN_POINTS = 20
MAPS_MAX_BYTES = 1_700_000
"""Bytes of the page for the coverage maps of all runs."""
RUN_MAPS_MAX_BYTES = 400_000
"""Bytes of the page for the coverage maps of one run."""
MAX_ENDS = 20
"""Number of last rounds of other seeds at which a curve has a point."""
SIZE_PROBE_ROUNDS = 24
"""Number of rounds that are packed to estimate how many fit."""


def points_for(runs: int) -> int:
    """Return how many points a curve may have if the page shows this many runs.

    >>> points_for(1), points_for(50)
    (400, 142)
    """
    points = CURVES_MAX_BYTES // (runs * CURVE_COLUMNS * CHARACTERS_PER_VALUE)
    return max(MIN_POINTS, min(MAX_POINTS, points))


def evenly_spaced(number: int, most: int) -> list[int]:
    """Return at most `most` of the indices below `number`, with the first and the last.

    >>> evenly_spaced(5, 10), evenly_spaced(9, 3)
    ([0, 1, 2, 3, 4], [0, 4, 8])
    """
    if number <= most:
        return list(range(number))
    if most <= 1:
        return [number - 1]
    return [index * (number - 1) // (most - 1) for index in range(most)]


def sample_ends(rounds: Iterable[int]) -> frozenset[int]:
    """Return a limited number of the last rounds of a group's runs, with the latest."""
    ends = sorted(set(rounds))
    return frozenset(ends[index] for index in evenly_spaced(len(ends), MAX_ENDS))


def lowest(values: Sequence[Any]) -> Any:
    """Return the lowest value of neighbouring rounds; a curve of minima must not lose one."""
    return min((value for value in values if value is not None), default=None)


def last_value(values: Sequence[Any]) -> Any:
    """Return the last value of neighbouring rounds."""
    return values[-1]


def downsample_columns(
    columns: dict[str, list[Any]],
    planned: int,
    most: int,
    keep: Mapping[str, Callable[[Sequence[Any]], Any]],
    ends: Collection[int] = (),
) -> dict[str, list[Any]]:
    """Shorten columns of equal length.

    The first and the last row stay. All other rows depend only on the planned length and on
    `ends`, so that a run that stopped early can be averaged with others.

    Args:
        columns: The columns by name, among them "round".
        planned: The number of rows of a complete run.
        most: The number of rows that a complete run may keep.
        keep: How to summarise neighbouring rows, by column (default: take the last).
        ends: Rounds that stay because a run of the group ended in them.
    """
    stride = -(-planned // most)
    last_row = len(columns["round"]) - 1
    chosen_rows = [
        row
        for row, round in enumerate(columns["round"])
        if (row + 1) % stride == 0 or row in (0, last_row) or round in ends
    ]
    shortened: dict[str, list[Any]] = {name: [] for name in columns}
    start = 0
    for row in chosen_rows:
        for name, column in columns.items():
            summarise = keep.get(name, last_value)
            shortened[name].append(compact_number(summarise(column[start : row + 1])))
        start = row + 1
    return shortened


def compact_number(value: Any) -> Any:
    """Return a number with five digits, or None if it is not finite. Other values stay.

    >>> compact_number(0.123456789), compact_number(float("nan"))
    (0.12346, None)
    >>> compact_number(12), compact_number(2.0)
    (12, 2)
    """
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def pack_coverage_maps(lines: Sequence[MetricsLine], runs: int) -> str | None:
    """Return the coverage maps of as many rounds as fit, compressed; None if there are none."""
    frames = [_frame(line) for line in lines if line.get("pictures")]
    if not frames:
        return None
    max_bytes = min(RUN_MAPS_MAX_BYTES, MAPS_MAX_BYTES // runs)
    num_frames = _estimate_fitting_frames(frames, max_bytes)
    while num_frames:
        packed = _pack([frames[index] for index in evenly_spaced(len(frames), num_frames)])
        if len(packed) <= max_bytes:
            return packed
        num_frames = num_frames * 9 // 10
    return None


def _frame(line: MetricsLine) -> dict[str, Any]:
    clients, maps = line["clients"], line["pictures"]
    return {
        "round": line["round"] + 1,
        "capacities": {client: clients[client]["capacity"] for client in maps["clients"]},
        "answered": len(clients),
        **maps,
    }


def _estimate_fitting_frames(frames: list[dict[str, Any]], max_bytes: int) -> int:
    sample = [frames[index] for index in evenly_spaced(len(frames), SIZE_PROBE_ROUNDS)]
    return min(len(frames), len(sample) * max_bytes // len(_pack(sample)))


def _pack(frames: list[dict[str, Any]]) -> str:
    text = json.dumps(_hoist_layers(frames))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _hoist_layers(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Store the layers once: they are the same in every round."""
    frames_without_layers = [
        {key: value for key, value in frame.items() if key != "layers"} for frame in frames
    ]
    return {"layers": frames[0]["layers"], "frames": frames_without_layers}
