"""A fleet whose nodes have rows of their own: the files of the server and of two nodes, and the
same rows in one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcover.data.datasets import load
from fedcover.runs.experiment import Experiment

NODES = ([0, 1, 2], [3, 4])
"""Which of five clients each node holds."""


@dataclass(frozen=True)
class Files:
    """Where the rows are: for the server, for each node, and all together."""

    server: Path
    nodes: tuple[Path, ...]
    together: Path

    def experiment(self, **fields) -> Experiment:
        """One whose clients' rows are on nodes."""
        small = {
            "model": "mlp(hidden=[24])",
            "fleet": "3x1.0 + 2x0.5",
            "policy": "rolling",
            "weights": "samples",
        }
        common = {"clients": 5, "active": 5, "rounds": 3, "epochs": 1, "dataset": str(self.server)}
        return Experiment(**{**small, **common, "partition": "nodes", **fields})

    def in_one_process(self, wanted: Experiment) -> Experiment:
        """The same with all rows in one file."""
        return Experiment(
            **{**wanted.model_dump(), "dataset": str(self.together), "partition": "owner"}
        )


def written(folder: Path) -> Files:
    """Digits of five owners, who have different labels and numbers of rows; the server has none of
    their rows.
    """
    digits = load("digits")
    x, y = digits.train.x.numpy(), digits.train.y.numpy()
    owner = 10 * np.minimum(y // 2, 3) + 10 * (
        np.arange(len(y)) % 7 == 0
    )  # any numbers will do for names
    owner = np.unique(owner, return_inverse=True)[1]
    test = {"test_x": digits.test.x.numpy(), "test_y": digits.test.y.numpy()}
    np.savez(folder / "together.npz", train_x=x, train_y=y, train_owner=owner, **test)
    blank = {"train_x": np.zeros((10, *x.shape[1:]), np.float32), "train_y": np.arange(10)}
    np.savez(folder / "server.npz", **blank, **test)
    for place, partition_id in enumerate(NODES):
        here = np.isin(owner, partition_id)
        np.savez(
            folder / f"node-{place}.npz",
            train_x=x[here],
            train_y=y[here],
            train_owner=10 * owner[here],
        )
    nodes = tuple(folder / f"node-{place}.npz" for place in range(len(NODES)))
    return Files(folder / "server.npz", nodes, folder / "together.npz")
