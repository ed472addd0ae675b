"""Write the metrics of every round for TensorBoard while a run is active."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedcover.errors import FedcoverError
from fedcover.host.disk import check_not_linked
from fedcover.server.round import RoundReport

HEADINGS = {
    "gamma": "coverage",
    "delta2": "coverage",
    "bytes": "cost",
    "parameters": "cost",
    "multiply": "cost",
}
"""The group of a metric, by the first part of its name; all others are scores."""


@contextmanager
def tensorboard_writer(folder: Path) -> Iterator[Callable[[RoundReport], None]]:
    """Give a function that writes the numbers of a round into event files.

    The step of an event is the number of finished rounds.

    Raises:
        FedcoverError: if TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise FedcoverError(
            "TensorBoard is not installed; in a checkout of fedcover: pip install '.[tensorboard]'"
        )
    check_not_linked(folder)
    summary_writer = import_module("torch.utils.tensorboard").SummaryWriter
    writer: Any = None

    def write(report: RoundReport) -> None:
        nonlocal writer
        step = report.round + 1
        if writer is None:  # created late, so that a run that fails at once leaves no files
            writer = summary_writer(log_dir=str(folder), purge_step=step)
        for name, value in scalars(report.metrics).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a round, named heading/metric as TensorBoard groups them.

    >>> scalars({"accuracy": 0.5, "gamma_round": 2, "delta2_mean": None, "seconds": {"policy": 1}})
    {'score/accuracy': 0.5, 'coverage/gamma_round': 2, 'seconds/policy': 1}
    """
    numbers: dict[str, float] = {}
    for metric, value in metrics.items():
        if isinstance(value, int | float):
            heading = HEADINGS.get(metric.partition("_")[0], "score")
            numbers[f"{heading}/{metric}"] = value
    for phase, seconds in metrics.get("seconds", {}).items():
        numbers[f"seconds/{phase}"] = seconds
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
