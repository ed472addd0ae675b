"""Draw the curves of runs with matplotlib, in distinct colours, dashes and markers."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.runs.metrics_log import Metrics

COLOURS = ("#003a6a", "#e76d1e", "#6f9158", "#ba5582", "#744900", "#3f3338", "#714cc9", "#4996d0")
MARKERS = "osD^vph*"
DASHES = ("-", "--", ":", "-.")
_REPEATABLE_SVG = {"svg.hashsalt": "fedcover", "svg.fonttype": "none"}
PANELS = {
    "accuracy": "accuracy (test)",
    "loss": "loss (test)",
    "gamma_round": "coverage in a round",
    "delta2_mean": "noise (energy cut away)",
}
"""The metrics that are drawn, and their titles."""


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure without a window."""
    return _matplotlib("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def check_plot_path(path: str | Path) -> None:
    """Raise before hours of training if matplotlib cannot write that kind of file."""
    canvas = _matplotlib("matplotlib.backend_bases").FigureCanvasBase
    suffixes = sorted(canvas.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in suffixes:
        raise InvalidValue(
            f"plot must be a file that ends in one of {', '.join(suffixes)}; got {str(path)!r}"
        )


def _matplotlib(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise FedcoverError(
            "a plot needs matplotlib; in a checkout of fedcover: pip install '.[plot]'"
        ) from None


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to a file; its suffix decides the format."""
    check_plot_path(path)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FedcoverError(f"cannot write {path}: {error.strerror}") from error


def to_svg(figure: Any, description: str) -> bytes:
    """Return a figure as SVG, with a description in its metadata.

    The same figure gives the same bytes, as long as matplotlib is the same.
    """
    content = BytesIO()
    with _matplotlib("matplotlib").rc_context(_REPEATABLE_SVG):
        metadata = {"Date": None, "Creator": None, "Description": description}
        figure.savefig(content, format="svg", metadata=metadata)
    return content.getvalue()


def draw(runs_by_label: Mapping[str, Sequence[Metrics]]) -> Any:
    """Draw accuracy, loss, coverage and noise over the rounds.

    The runs of one label share a line, their mean. A band around it goes from the lowest to the
    highest run.
    """
    figure = new_figure(10, 6.4)
    for axes, (metric, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for index, (label, runs) in enumerate(runs_by_label.items()):
            draw_line(axes, metric, label, runs, index)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("rounds", fontsize=9)
        axes.grid(alpha=0.3)
        if not axes.lines:
            centre = {"ha": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "not measured yet", color="0.4", **centre)
    _add_legend(figure)
    return figure


def _add_legend(figure: Any) -> None:
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(4, len(labels)),
            frameon=False,
            fontsize=9,
        )


def draw_line(
    axes: Any, metric: str, label: str, runs: Sequence[Metrics], index: int, *, band: bool = True
) -> None:
    """Draw the line of one label; `index` decides its colour, dashes and marker."""
    values_by_round = _values_by_round(metric, runs)
    rounds = sorted(values_by_round)
    if not rounds:
        return
    colour = COLOURS[index % len(COLOURS)]
    if band and any(len(values) > 1 for values in values_by_round.values()):
        low = [min(values_by_round[round]) for round in rounds]
        high = [max(values_by_round[round]) for round in rounds]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    marker_distance = max(1, len(rounds) // 6)
    axes.plot(
        rounds,
        [fmean(values_by_round[round]) for round in rounds],
        markevery=(index % marker_distance, marker_distance),
        markersize=5,
        label=label,
        color=colour,
        linestyle=DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        marker=MARKERS[index % len(MARKERS)],
    )


def _values_by_round(metric: str, runs: Sequence[Metrics]) -> dict[int, list[float]]:
    """Return the finite values of a metric in all runs, by round counted from 1."""
    values: dict[int, list[float]] = {}
    for metrics in runs:
        for line in metrics:
            value = line.get(metric)
            if value is not None and math.isfinite(value):
                values.setdefault(line["round"] + 1, []).append(value)
    return values
