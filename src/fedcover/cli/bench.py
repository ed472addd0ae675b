"""The command that measures speed: bench."""

import json as js
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis.bench import MAX_SPREAD_RATIO, page
from fedcover.analysis.bench import bench as measure
from fedcover.cli import console
from fedcover.cli.options import Device, Json, app
from fedcover.errors import InvalidValue
from fedcover.runs.machine import Machine


@app.command
def bench(
    *,
    device: Device = "auto",
    out: Annotated[Path | None, Parameter(help="Write the table to this Markdown file.")] = None,
    json: Json = False,
) -> None:
    """Measure the engines, a plain eager loop and the lower limit, as ratios from one run."""
    device_name = Machine(device=device).resolved().device
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise InvalidValue(f"out must be a file in a folder that exists; got {str(out)!r}")
    figures = []
    for figure in measure(device_name):
        figures.append(figure)
        if not json:
            ratios = ", ".join(f"{name} {value:.2f}" for name, value in figure.ratios)
            print(f"{figure.what:65} {figure.median_ms:9.3f} ms  {ratios}", flush=True)
    num_unsteady = sum(figure.unsteady for figure in figures)
    if num_unsteady:
        console.notify(
            f"{num_unsteady} of {len(figures)} timings vary more than {MAX_SPREAD_RATIO}-fold"
            " between repetitions; if the computer is busy, measure again when it is idle"
        )
    if json:
        print(js.dumps([asdict(figure) for figure in figures], indent=2))
    if out:
        out.write_text(page(figures, device_name))
