"""Draw the document's figures: loss and accuracy by round, from the results alone."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcover.host.disk import write_atomically
from fedcover.paper.cells import SETS, Cell
from fedcover.paper.evidence import Evidence
from fedcover.runs import plotting
from fedcover.runs.metrics_log import Metrics

METRICS = ("loss", "accuracy")
MAX_BANDS = 8
"""With more lines than this, bands would hide each other."""
OUTLIER_PERCENT = 10
"""The first rounds are far from the rest: so many of the points may lie outside a panel."""


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """Describe a figure: its title, its column, and the cells of MNIST that it shows."""

    title: str
    column: str
    cells: str

    def shows(self, cell: Cell) -> bool:
        """Return whether a cell is in the figure: one of its set, or of the medium level."""
        if (cell.dataset, cell.column) != ("mnist", self.column):
            return False
        if self.cells in SETS:
            return cell.row in ("main", "appendix") and self.cells in cell.sets
        return cell.row == "main" and cell.level in ("full", self.cells)


FIGURES = {
    "medium-iid": FigureSpec("MNIST, IID, medium level", "iid", "medium"),
    "medium-L2": FigureSpec("MNIST, L=2, medium level", "L2", "medium"),
    "pruning-iid": FigureSpec("MNIST, IID, weights pruning", "iid", "mnist-pruning"),
    "pruning-L2": FigureSpec("MNIST, L=2, weights pruning", "L2", "mnist-pruning"),
    "subnet-iid": FigureSpec("MNIST, IID, fixed sub-networks", "iid", "mnist-subnet"),
    "subnet-L2": FigureSpec("MNIST, L=2, fixed sub-networks", "L2", "mnist-subnet"),
}

RunsByDesign = Mapping[str, Sequence[Metrics]]


def runs_by_figure(evidence: Evidence) -> dict[str, RunsByDesign]:
    """Return the metrics of the runs of each figure; figures without any are left out."""
    figures = {name: _runs_by_design(evidence, spec) for name, spec in FIGURES.items()}
    return {name: runs for name, runs in figures.items() if _has_every_metric(runs)}


def _runs_by_design(evidence: Evidence, spec: FigureSpec) -> RunsByDesign:
    return {
        cell.design: [_metrics(run["curve"]) for run in evidence.results[id] if not run["diverged"]]
        for id, cell in evidence.cells.items()
        if spec.shows(cell)
    }


def _metrics(curve: Mapping[str, Sequence[Any]]) -> Metrics:
    """Return a stored curve, which counts rounds from 1, as the metrics of its rounds."""
    present = [metric for metric in METRICS if curve.get(metric)]
    return [
        {"round": int(round) - 1} | {metric: curve[metric][index] for metric in present}
        for index, round in enumerate(curve["round"])
    ]


def _has_every_metric(runs: RunsByDesign) -> bool:
    lines = [line for metrics in runs.values() for run in metrics for line in run]
    return all(any(metric in line for line in lines) for metric in METRICS)


def draw(title: str, runs: RunsByDesign) -> Any:
    """Draw loss and accuracy by round: for each design the mean of its runs.

    If there are few designs, bands span the lowest to the highest run.
    """
    figure = plotting.new_figure(11, 4.2)
    names = [name for name, metrics in runs.items() if metrics]
    for axes, metric in zip(figure.subplots(1, len(METRICS)), METRICS, strict=True):
        for index, name in enumerate(names):
            band = len(names) <= MAX_BANDS
            plotting.draw_line(axes, metric, name, runs[name], index, band=band)
        axes.set_ylim(*_limits(metric, [line.get_ydata() for line in axes.lines]))
        axes.set_title(metric, fontsize=10, loc="left")
        axes.set_xlabel("round", fontsize=9)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.legend(
        *figure.axes[-1].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    return figure


def _limits(metric: str, lines: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the range of a panel, in which the first rounds may be cut off."""
    percents = (0, 100 - OUTLIER_PERCENT) if metric == "loss" else (OUTLIER_PERCENT, 100)
    low, high = np.percentile(np.concatenate(lines), percents)
    margin = 0.05 * ((high - low) or 1.0)
    return float(low - margin), float(high + margin)


def data_digest(title: str, runs: RunsByDesign) -> str:
    """Return a digest of all that a figure shows; its file holds it."""
    return hashlib.sha256(json.dumps([title, runs]).encode()).hexdigest()


def write_figures(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the figures that have results."""
    contents = draw_figures(evidence)
    if contents:
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in contents.items():
        path = folder / f"{name}.svg"
        write_atomically(path, content)
        paths.append(path)
    return paths


def draw_figures(evidence: Evidence) -> dict[str, bytes]:
    """Return the figures that have results as SVG, by name."""
    contents = {}
    for name, runs in runs_by_figure(evidence).items():
        title = FIGURES[name].title
        description = f"data {data_digest(title, runs)}"
        contents[name] = plotting.to_svg(draw(title, runs), description)
    return contents


def figure_links(evidence: Evidence) -> str:
    """Return a link to each figure, or a note that it has not been run."""
    with_runs = runs_by_figure(evidence)
    lines = []
    for name, spec in FIGURES.items():
        if name in with_runs:
            lines.append(f"![{spec.title}: loss and accuracy by round](reproduction/{name}.svg)")
        else:
            lines.append(f"{spec.title}: not run.")
    return "\n\n".join(lines)
