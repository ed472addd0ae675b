"""The figures of every round for TensorBoard, written while a run goes on."""

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


@contextmanager
def tensorboard_writer(folder: Path) -> Iterator[Callable[[RoundReport], None]]:
    """A function that writes every number of a round it is told of into event files, under the rounds done by then."""
    if find_spec("tensorboard") is None:
        raise FedcoverError(
            "logging for TensorBoard needs it; in a checkout of fedcover: pip install '.[tensorboard]'"
        )
    check_not_linked(folder)
    make = import_module("torch.utils.tensorboard").SummaryWriter
    writers: list[Any] = []

    def write(report: RoundReport) -> None:
        if (
            not writers
        ):  # not before there is something to write: a run that is refused leaves nothing behind
            writers.append(make(log_dir=str(folder), purge_step=report.round + 1))
        for name, value in scalars(report.metrics).items():
            writers[0].add_scalar(name, value, report.round + 1)
        writers[0].flush()

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers of a round by a name with its heading, as TensorBoard groups them.

    >>> scalars({"accuracy": 0.5, "gamma_round": 2, "delta2_mean": None, "seconds": {"policy": 0.1}})
    {'score/accuracy': 0.5, 'coverage/gamma_round': 2, 'seconds/policy': 0.1}
    """
    named = {f"seconds/{phase}": value for phase, value in metrics.get("seconds", {}).items()}
    plain = {
        f"{_heading(key)}/{key}": v for key, v in metrics.items() if isinstance(v, int | float)
    }
    return {name: value for name, value in {**plain, **named}.items() if math.isfinite(value)}


def _heading(figure: str) -> str:
    headings = {
        "gamma": "coverage",
        "delta2": "coverage",
        "bytes": "cost",
        "parameters": "cost",
        "multiply": "cost",
    }
    return headings.get(figure.partition("_")[0], "score")
