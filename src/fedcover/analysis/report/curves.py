"""The curves of a run: metrics by round, with the traffic and the time spent until then."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fedcover.analysis.report.downsample import downsample_columns, lowest, sample_ends
from fedcover.analysis.report.load import MetricsLine, RunRecord

Ends = dict[str, frozenset[int]]

SCORE_METRICS = (
    "accuracy",
    "loss",
    "accuracy_averaged",
    "loss_averaged",
    "validation_accuracy",
    "validation_loss",
    "validation_accuracy_averaged",
    "validation_loss_averaged",
)
ROUND_METRICS = ("train_loss", "gamma_round", "gamma_window", "delta2_mean")
BYTES_PER_MEGABYTE = 1e6


def last_rounds_of(seeds: Sequence[RunRecord]) -> Ends:
    """Return the last rounds of a group's runs, counted from 1.

    "scores" are the last rounds with an evaluation, "every" the last of all.
    """
    lines_by_curve = {
        "scores": [_evaluated(record) for record in seeds],
        "every": [record.lines for record in seeds],
    }
    ends = {}
    for curve, lines_by_seed in lines_by_curve.items():
        last_rounds = [lines[-1]["round"] + 1 for lines in lines_by_seed if lines]
        ends[curve] = sample_ends(last_rounds)
    return ends


def curves(record: RunRecord, ends: Ends, max_points: int) -> dict[str, Any]:
    """Return the metrics of evaluated rounds ("scores") and of all rounds ("every")."""
    scores = _columns(record, SCORE_METRICS, _evaluated(record))
    every = _columns(record, ROUND_METRICS, record.lines)
    minima = {"gamma_round": lowest, "gamma_window": lowest}
    num_evaluations = -(-record.rounds // int(record.settings.get("evaluate_every", 1)))
    return {
        "scores": downsample_columns(scores, num_evaluations, max_points, {}, ends["scores"]),
        "every": downsample_columns(every, record.rounds, max_points, minima, ends["every"]),
        "thinned": record.rounds > max_points,
    }


def _columns(
    record: RunRecord, metrics: Sequence[str], lines: Sequence[MetricsLine]
) -> dict[str, list[Any]]:
    """Return the metrics of some rounds, and the traffic and the seconds until each of them.

    Metrics that were never measured are left out.
    """
    megabytes = dict(zip(_rounds(record), accumulate(map(_megabytes, record.lines)), strict=True))
    seconds = dict(zip(_rounds(record), accumulate(map(_seconds, record.lines)), strict=True))
    columns = {
        "round": [line["round"] + 1 for line in lines],
        "moved": [megabytes[line["round"]] for line in lines],
        "seconds": [seconds[line["round"]] for line in lines],
    }
    for metric in metrics:
        column = [line.get(metric) for line in lines]
        if any(value is not None for value in column):
            columns[metric] = column
    return columns


def _rounds(record: RunRecord) -> list[int]:
    return [line["round"] for line in record.lines]


def _megabytes(line: MetricsLine) -> float:
    return float((line.get("bytes_down", 0) + line.get("bytes_up", 0)) / BYTES_PER_MEGABYTE)


def _seconds(line: MetricsLine) -> float:
    return float(sum(line.get("seconds", {}).values()))


def _evaluated(record: RunRecord) -> list[MetricsLine]:
    return [line for line in record.lines if "accuracy" in line]
