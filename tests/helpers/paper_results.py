"""Every cell of the reproduction, and made-up results of cells."""

import json

from fedcover.paper import results, store
from fedcover.paper.cells import cells
from fedcover.paper.claims import DATASETS
from fedcover.paper.results import CellRun
from fedcover.runs.machine import Machine

EVERY = cells(dict.fromkeys(DATASETS, 0.1))
BY_ID = {cell.id: cell for cell in EVERY}


def write_result(folder, id, seed, accuracy, *, validation=None, local=None):
    """A result such as a run of two rounds would leave; the figures are made up."""
    cell = BY_ID[id]
    line = {
        "gamma_round": 6,
        "gamma_window": 6,
        "delta2_mean": 0.1,
        "parameters": 10.0,
        "multiply_adds": 10.0,
        "bytes_down": 1,
        "bytes_up": 1,
        "seconds": {"training": 1.0},
        "loss": 1 - accuracy,
    }
    scores = {
        "accuracy": accuracy,
        "accuracy_common": accuracy,
        "accuracy_local": local or accuracy,
    }
    held_out = {} if validation is None else {"validation_accuracy": validation}
    metrics = [
        {"round": 0, **line, **{name: value / 2 for name, value in scores.items()}, **held_out},
        {"round": 1, **line, **scores, **held_out},
    ]
    finished = CellRun(cell.with_seed(seed), metrics, Machine(device="cpu").resolved())
    return store.write(folder, cell, results.to_result(cell, finished))


def read_lines(path):
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def change_result(folder, cell, seed, **fields):
    """Write a stored result anew with other fields, as an editor could."""
    result = store.load(folder)[cell.id, seed].result
    store.write(folder, cell, {**result, **fields})
