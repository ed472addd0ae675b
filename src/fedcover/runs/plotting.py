"""Curves of runs as a picture file or a matplotlib figure, in colours, dashes and marks that differ for every eye."""

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.runs.metrics_log import Metrics

COLOURS = ("#003a6a", "#e76d1e", "#6f9158", "#ba5582", "#744900", "#3f3338", "#714cc9", "#4996d0")
MARKERS = "osD^vph*"
DASHES = ("-", "--", ":", "-.")
PANELS = {
    "accuracy": "accuracy (test)",
    "loss": "loss (test)",
    "gamma_round": "coverage in a round",
    "delta2_mean": "noise (energy cut away)",
}
"""What is drawn: figures of a round, and what they are called."""


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure that belongs to no window."""
    return _matplotlib("figure").Figure(figsize=(width, height), layout="constrained")


def check_plot_path(path: str | Path) -> None:
    """Complain now, not after hours of training, if a plot could not be written as the file's name says."""
    known = sorted(_matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise InvalidValue(
            f"plot must be a file that ends in one of {', '.join(known)}; got {str(path)!r}"
        )


def _matplotlib(part: str) -> Any:
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError:
        raise FedcoverError(
            "a plot needs matplotlib; in a checkout of fedcover: pip install '.[plot]'"
        ) from None


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as a file of the kind that its name says."""
    check_plot_path(path)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FedcoverError(f"cannot write {path}: {error.strerror}") from error


def draw(histories: Mapping[str, Sequence[Metrics]]) -> Any:
    """A figure of accuracy, loss, coverage and noise over rounds; the runs of one label become a line with a band.

    The line is their mean, the band goes from the lowest to the highest.
    """
    figure = new_figure(10, 6.4)
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for place, (label, runs) in enumerate(histories.items()):
            _line(axes, name, label, runs, place)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("rounds", fontsize=9)
        axes.grid(alpha=0.3)
        if not axes.lines:
            axes.text(
                0.5, 0.5, "not measured yet", ha="center", transform=axes.transAxes, color="0.4"
            )
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
    return figure


def _line(axes: Any, name: str, label: str, runs: Sequence[Metrics], place: int) -> None:
    met: dict[int, list[float]] = {}
    for lines in runs:
        for line in lines:
            value = line.get(name)
            if value is not None and math.isfinite(value):
                met.setdefault(line["round"] + 1, []).append(value)
    rounds = sorted(met)
    if not rounds:
        return
    colour = COLOURS[place % len(COLOURS)]
    if any(len(values) > 1 for values in met.values()):
        low, high = [min(met[r]) for r in rounds], [max(met[r]) for r in rounds]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    style = {
        "color": colour,
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }
    every = max(1, len(rounds) // 6)
    axes.plot(
        rounds,
        [fmean(met[r]) for r in rounds],
        markevery=(place % every, every),
        markersize=5,
        label=label,
        **style,
    )
