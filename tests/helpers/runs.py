"""Small experiments, and two runs compared bit for bit."""

import json
from pathlib import Path

import torch

import fedcover as fc
from fedcover.runs.checkpoints import list_checkpoints

TINY = {
    "fleet": "1x1.0 + 1x0.5",
    "policy": "prefix",
    "clients": 20,
    "active": 4,
    "rounds": 4,
    "epochs": 1,
    "model": "mlp(hidden=[16])",
}

RESNET = {
    "model": "wide_resnet(depth=10, widen=1)",
    "assignment": "slot",
    "clients": 100,
    "active": 2,
    "rounds": 2,
    "calibration": 50,
}


def tiny(**fields) -> fc.Experiment:
    return fc.Experiment(**{**TINY, **fields})


def figures(run: fc.Run | Path) -> list[dict]:
    """All that a run measured, but for the time it took."""
    if isinstance(run, Path):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    else:
        lines = run.metrics
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def last_checkpoint(folder: Path) -> tuple[str, bytes]:
    """Name and content of the newest state."""
    newest = list_checkpoints(folder / "checkpoints")[0].path
    return newest.name, newest.read_bytes()


def assert_same_end(folder: Path, other: Path) -> None:
    """Two run folders ended alike, bit for bit."""
    assert figures(folder) == figures(other)
    assert last_checkpoint(folder) == last_checkpoint(other)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Check that two sets of tensors are equal, bit for bit."""
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
