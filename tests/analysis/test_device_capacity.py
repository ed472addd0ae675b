"""What a device can hold: the largest part that fits its memory and the time, found on this very
machine.
"""

import json
from dataclasses import replace

import pytest
import torch

from fedcover.analysis.device_capacity import (
    CANDIDATE_CAPACITIES,
    REPEATS,
    STEPS,
    USABLE_SHARE,
    free_host_memory,
    propose,
    slices_for_capacity,
)
from fedcover.errors import InvalidValue
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.submodels.cost import memory_to_train
from tests.helpers.command_line import refused
from tests.helpers.worlds import world


def quiet(sentence):
    pass


def setup_of(**fields):
    return prepare(
        Experiment(**{"clients": 20, "active": 4, **fields}), Machine(device="cpu").resolved()
    )


def test_capacity_is_the_whole_model_without_limits():
    setup = setup_of()
    proposal = propose(setup, memory=10**12, tell=quiet)
    (trial,) = proposal.trials
    assert proposal.capacity == trial.capacity == 1.0
    assert trial.fits
    assert trial.parameters == sum(p.numel() for p in setup.task.model.module.parameters())
    rows = sum(len(setup.task.source.shard(client).index) for client in range(10)) / 10
    assert trial.round_seconds == pytest.approx(trial.step_seconds * 5 * -(-rows // 10))
    assert trial.step_seconds > 0


@pytest.mark.parametrize("measure", ["width", "parameters"])
def test_largest_capacity_that_fits_is_proposed(measure):
    setup = setup_of(capacity=measure)
    needed = {
        share: memory_to_train(setup.task.model, part, (1, 8, 8), batch_size=10)
        for share in CANDIDATE_CAPACITIES
        if (part := slices_for_capacity(setup, share)) is not None
    }
    assert list(needed.values()) == sorted(needed.values(), reverse=True)
    for expected in (0.5, 0.25):
        proposal = propose(setup, memory=int(needed[expected] / USABLE_SHARE) + 1, tell=quiet)
        assert proposal.capacity == expected
        assert [trial.capacity for trial in proposal.trials] == [
            share for share in CANDIDATE_CAPACITIES if share >= expected
        ]
        assert [trial.memory for trial in proposal.trials] == [
            needed[share] for share in CANDIDATE_CAPACITIES if share >= expected
        ]
        assert [trial.step_seconds for trial in proposal.trials[:-1]] == [None] * (
            len(proposal.trials) - 1
        )


def test_capacity_in_parameters_is_never_exceeded():
    setup = setup_of(capacity="parameters")
    full = sum(p.numel() for p in setup.task.model.module.parameters())
    for share in CANDIDATE_CAPACITIES:
        part = slices_for_capacity(setup, share)
        assert (
            sum(part.sizes(dict(setup.task.model.module.named_parameters())).values())
            <= share * full
        )
    assert slices_for_capacity(setup, 1e-9) is None


def test_capacity_is_none_where_nothing_fits():
    assert propose(setup_of(), memory=1, tell=quiet).capacity is None
    proposal = propose(setup_of(), seconds=1e-9, tell=quiet)
    assert proposal.capacity is None
    assert [trial.capacity for trial in proposal.trials] == list(CANDIDATE_CAPACITIES)
    assert all(trial.round_seconds > 1e-9 for trial in proposal.trials)


def test_capacity_is_measured_by_training():
    """As many local steps as promised, on sub-models of the capacity's own size, and the model
    stays as it was.
    """
    setup = setup_of(model="mlp(hidden=[16])")
    before = {name: p.clone() for name, p in setup.task.model.module.named_parameters()}
    sizes = []
    loss = setup.task.recipe.loss

    def counted(forward, params, batch, carry):
        sizes.append((sum(p.numel() for p in params.values()), len(batch.x)))
        return loss(forward, params, batch, carry)

    watched = replace(
        setup, task=replace(setup.task, recipe=replace(setup.task.recipe, loss=counted))
    )
    proposal = propose(watched, memory=10**12, tell=quiet)
    assert sizes == [(proposal.trials[0].parameters, 10)] * STEPS * (1 + REPEATS)
    assert all(
        torch.equal(before[name], p) for name, p in setup.task.model.module.named_parameters()
    )


@pytest.mark.parametrize("model", ["cnn", "depth_resnet", "transformer", "lstm", "lora"])
def test_capacity_of_every_model(model):
    setup, _ = world(model)
    assert propose(setup, memory=10**12, tell=quiet).capacity == 1.0


@pytest.mark.parametrize(
    ("memory", "seconds"), [(0, None), (-5, None), (None, 0), (None, -1), (None, float("nan"))]
)
def test_capacity_limits_that_are_wrong_are_refused(memory, seconds):
    with pytest.raises(InvalidValue, match=r"^(memory|seconds) must be "):
        propose(setup_of(), memory=memory, seconds=seconds, tell=quiet)


def test_free_memory_is_limited_by_the_container(tmp_path):
    for folder in ("proc", "sys/fs/cgroup/memory"):
        (tmp_path / folder).mkdir(parents=True)
    everything = free_host_memory(tmp_path)
    assert everything > 2**20  # nothing is told: all there is
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_host_memory(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("100\n")
    assert free_host_memory(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("1000100\n")
    assert free_host_memory(tmp_path) == 1000000
    (group / "memory/memory.limit_in_bytes").write_text("5000\n")
    (group / "memory/memory.usage_in_bytes").write_text("6000\n")
    assert free_host_memory(tmp_path) == 0


def test_capacity_command(fedcover, tmp_path):
    (tmp_path / "mine.toml").write_text('model = "mlp(hidden=[16])"\nclients = 20\nactive = 4\n')
    words = ["capacity", "mine.toml", "--device", "cpu", "--memory"]
    code, out, err = fedcover(*words, "0.02")
    assert code == 0
    assert "proposed capacity: " in out
    assert err.startswith("capacity 1: ")
    output = json.loads(fedcover(*words, "0.02", "--json", "--set", "capacity=parameters")[1])
    assert output["memory_free"] == 20_000
    assert output["capacity"] == output["trials"][-1]["capacity"] < 1
    assert "no capacity fits this device" in fedcover(*words, "0.00001")[1]
    for amount in ("0", "-5", "nan", "inf"):
        refused(
            fedcover(*words, amount),
            2,
            f"memory must be a number of megabytes above 0; got {amount}",
        )
