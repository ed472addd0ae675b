"""Shrink a cell to a smoke run: the same design with digits, a small model and two rounds."""

import re
from dataclasses import replace

from fedcover.paper.cells import Cell

SMOKE_LABEL_LIMITS = {"50": "5", "20": "2"}
"""The limits on the labels per client for ten classes, by those for a hundred."""


def smoke_cell(cell: Cell) -> Cell:
    """Return the same design at the size of a smoke run, whose numbers mean nothing."""
    experiment = cell.experiment
    label_limit = re.search(r"limit=(\d+)", experiment.partition)
    partition, model = experiment.partition, experiment.model
    if label_limit:
        limit = SMOKE_LABEL_LIMITS.get(label_limit[1], label_limit[1])
        partition = f"labels(limit={limit})"
    if model.startswith("wide"):
        model = "wide_resnet(depth=10, widen=1)"
    changes = {
        "dataset": "digits",
        "partition": partition,
        "model": model,
        "clients": 20,
        "rounds": 2,
        "epochs": 1,
        "calibration": 100,
        "local_every": None,
    }
    smoke_experiment = experiment.model_copy(update=changes)
    return replace(cell, id=f"digits-as-{cell.id}", experiment=smoke_experiment)
