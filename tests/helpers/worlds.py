"""Small worlds for tests: a complete setup in float64, so that two ways of computing can be told
apart.
"""

from dataclasses import replace

import torch

from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.round import initial_state
from fedcover.server.round_setup import Setup
from fedcover.submodels.cost import WeightUses
from fedcover.types import Samples, Shard, State

SMALL_MODELS = {
    "mlp": ("mlp(hidden=[8, 6])", "synthetic(shape=(1, 3, 4), classes=3, samples=7, test_size=50)"),
    "cnn": (
        "cnn(channels=[4, 6], hidden=8)",
        "synthetic(shape=(1, 8, 8), classes=3, samples=7, test_size=50)",
    ),
    "wide_resnet": (
        "wide_resnet(depth=10, widen=1)",
        "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)",
    ),
    "preact_resnet18": (
        "preact_resnet18(width=4)",
        "synthetic(shape=(3, 16, 16), classes=3, samples=7, test_size=50)",
    ),
    "depth_resnet": (
        "depth_resnet(width=4, stages=4, blocks=1)",
        "synthetic(shape=(3, 16, 16), classes=3, samples=7, test_size=50)",
    ),
    "transformer": ("transformer(width=8, heads=4, blocks=1, hidden=8)", "characters"),
    "lstm": ("lstm(embedding=4, hidden=6)", "characters"),
    "lora": (
        "lora(hidden=[8], rank=4)",
        "synthetic(shape=(1, 3, 4), classes=3, samples=7, test_size=50)",
    ),
    "softmax": ("softmax", "synthetic(shape=(1, 3, 4), classes=3, samples=7, test_size=50)"),
}
"""Every model of the table in a size for tests, with data of its shape."""


def doubled(x: torch.Tensor) -> torch.Tensor:
    """In float64, unless these are characters."""
    return x.double() if x.is_floating_point() else x


class Doubled:
    """A source in float64."""

    def __init__(self, source):
        self.inner = source
        self.classes = source.classes
        self.test = Samples(doubled(source.test.x), source.test.y)
        self.validation = None
        self.calibration = doubled(source.calibration)

    def count(self, client):
        return self.inner.count(client)

    def shard(self, client):
        shard = self.inner.shard(client)
        return Shard(Samples(doubled(shard.samples.x), shard.samples.y), shard.index)

    def labels(self, client):
        return self.inner.labels(client)


def world(model: str = "mlp", /, **fields: object) -> tuple[Setup, State]:
    """A setup and its first state in float64: six clients a round, of three capacities."""
    spec, dataset = SMALL_MODELS[model]
    defaults = {
        "model": spec,
        "dataset": dataset,
        "fleet": "2x1.0 + 2x0.5 + 2x0.25",
        "clients": 12,
        "active": 6,
        "rounds": 3,
        "epochs": 2,
        "batch_size": 3,
        "lr": 0.1,
        "window": 2,
        "calibration": 40,
    }
    if model == "depth_resnet":
        defaults["recipe"] = "depthfl"
    setup = prepare(Experiment(**{**defaults, **fields}), Machine(device="cpu").resolved())
    setup.task.model.module.double()
    source = Doubled(setup.task.source)
    uses = WeightUses(setup.task.model.module, source.test.x.shape[1:], source.test.x.dtype)
    setup = replace(setup, task=replace(setup.task, source=source), uses=uses)
    return setup, initial_state(setup)


def same(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    """Check that two sets of tensors agree, by name and value."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name],
            right[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
