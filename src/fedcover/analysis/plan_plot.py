"""Plot the report of a plan: the frontier as a line, the policies as points."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcover.runs.plotting import COLOURS, MARKERS, new_figure, save_figure


def plot(report: Mapping[str, Any], path: str | Path) -> None:
    """Plot the frontier and the policies; colours and shapes suit colour-blind readers."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    if report["exact"]:
        metric, period = "gamma", "in a round"
        label = "least noise (exact)"
    else:
        metric, period = "gamma_window", f"in {report['window']} rounds"
        label = "every unit held 0, 1, 2, ... times"
    points = report["frontier"]
    axes.plot(
        [point[metric] for point in points],
        [point["noise"] for point in points],
        ".-",
        color="0.55",
        label=label,
        zorder=1,
    )
    # Hollow markers of decreasing size: none hides another.
    for index, (name, coverage) in enumerate(report["policies"].items()):
        axes.scatter(
            coverage[metric],
            coverage["noise"],
            s=30 * (len(report["policies"]) - index) + 30,
            label=name,
            facecolors="none",
            linewidths=2,
            edgecolors=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
        )
    axes.set_xlabel(f"coverage: fewest times that any parameter is trained {period}")
    axes.set_ylabel("noise: energy cut away, summed over clients")
    axes.set_title(f"{report['model']}, {report['kind']}, fleet {report['fleet']}", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, labelspacing=1.0
    )
    save_figure(figure, path)
