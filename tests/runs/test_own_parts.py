"""What users bring along (folders, modules, data, policies, masks) is kept, served, or refused in a
sentence.
"""

import fcntl
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.data.datasets import hold_out
from fedcover.errors import InvalidValue, RunError, TrainingDiverged
from fedcover.fleet import Fleet
from fedcover.flower.nodes import NodeInfo, declared_fleet
from fedcover.host import locks
from fedcover.runs.export import export, load_part
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import prepare
from fedcover.runs.sweep import expand_choices
from fedcover.server.evaluation import evaluate
from fedcover.server.reply_format import RawReply, pack_update, pending_task
from fedcover.server.reply_validation import validate_reply
from fedcover.server.round import initial_state
from fedcover.server.round import start_round as rounds_ask
from fedcover.server.safetensors_codec import pack_arrays, unpack_arrays
from fedcover.submodels.reductions import Masks
from fedcover.types import Samples, Update

SMALL = {
    "clients": 20,
    "active": 4,
    "rounds": 2,
    "epochs": 1,
    "fleet": "1x1.0 + 1x0.5",
    "policy": "prefix",
}
HERE = fc.Machine("sequential", "cpu", 1)


def ran(folder=None, **given):
    parts = {key: given.pop(key) for key in ("model", "policy") if callable(given.get(key))}
    return fc.run(fc.Experiment(**{**SMALL, **given}), folder, machine=HERE, **parts)


def net(*layers, hidden=16):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, hidden), *layers, nn.ReLU(), nn.Linear(hidden, 10)
    )


# ── folders ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"policy": "planned(gamma=9)"}, InvalidValue), ({"lr": 1e25}, TrainingDiverged)],
)
def test_failed_run_removes_only_its_own_files(tmp_path, fields, error):
    """A folder may hold other things, say other runs: they are none of this one's business."""
    ran(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()
    }
    with pytest.raises(error):
        ran(tmp_path / "runs", **fields)
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()
    } == before
    with pytest.raises(error):
        ran(tmp_path / "new", **fields)
    assert not (tmp_path / "new").exists()


# ── modules ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("hidden", [8, 32])
@pytest.mark.parametrize(
    "again", [fc.load, fc.resume, lambda folder, model: fc.replay(folder, 0, model=model)]
)
def test_resume_refuses_another_module(tmp_path, again, hidden):
    ran(tmp_path / "run", model=net(), keep_rounds=[0])
    with pytest.raises(
        RunError, match=r"another model: its '1\.weight' has the shape \(16, 64\), not"
    ):
        again(tmp_path / "run", model=net(hidden=hidden))


def test_load_refuses_a_changed_model_builder(tmp_path, monkeypatch):
    """A model named in the experiment is code, which may have a layer more than when the run was
    made.
    """
    monkeypatch.setattr(sys.modules[__name__], "build", lambda *_: net(), raising=False)
    ran(tmp_path / "run", model=f"{__name__}:build()", policy="full")
    monkeypatch.setattr(
        sys.modules[__name__], "build", lambda *_: net(nn.Linear(16, 16)), raising=False
    )
    with pytest.raises(RunError, match=r"was made with another model: its '3\.weight' "):
        fc.load(tmp_path / "run")


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(16, track_running_stats=False),
        nn.BatchNorm1d(16, affine=False, track_running_stats=False),
    ],
)
def test_batch_norm_without_statistics_is_calibrated(norm):
    """HeteroFL's own setting: in evaluation such a layer would take the statistics of the test
    batch.
    """
    run = ran(model=net(norm), policy="full")
    test, model = run.setup.task.source.test, run.model()
    order = torch.argsort(test.y)
    assert torch.allclose(model(test.x), torch.cat([model(x) for x in test.x.split(1)]), atol=1e-5)
    by_label = evaluate(run.setup.task, run.state, Samples(test.x[order], test.y[order]))
    assert by_label.loss == pytest.approx(evaluate(run.setup.task, run.state, test).loss, rel=1e-6)


# ── taking parts away ─────────────────────────────────────────────────────────────────────────────


def masks_of(*names):
    def policy(view):
        masks = {name: torch.zeros(view.params[name].shape, dtype=torch.bool) for name in names}
        for mask in masks.values():
            mask.view(-1)[::3] = True
        return [Masks(masks)] * len(view.cohort)

    return policy


@pytest.mark.parametrize(
    "names", [["hidden1.weight"], ["hidden2.weight", "head.bias"], ["head.bias"]]
)
def test_part_with_masks_of_any_tensors_is_exported(tmp_path, names):
    run = ran(model="mlp(hidden=[20, 20])", policy=masks_of(*names), fleet="1x1")
    export(run, 1.0, tmp_path / "part.safetensors")
    x = run.setup.task.source.test.x
    assert torch.equal(load_part(tmp_path / "part.safetensors")(x), run.submodel(1.0)(x))


def test_part_of_a_module_changed_by_the_recipe_is_exported(tmp_path):
    run = ran(model=net(), recipe="fedmask", policy="full")
    export(run, 1.0, tmp_path / "part.safetensors")
    x = run.setup.task.source.test.x
    assert torch.equal(
        load_part(tmp_path / "part.safetensors", model=net())(x), run.submodel(1.0)(x)
    )


# ── policies ──────────────────────────────────────────────────────────────────────────────────────


def test_own_policy_must_keep_nested_units_from_the_first():
    def last_stage(view):
        units = {
            g.name: torch.tensor([g.size - 1]) if g.nested else torch.arange(g.size)
            for g in view.groups
        }
        return [fc.Slices(view.groups, units)] * len(view.cohort)

    with pytest.raises(InvalidValue, match=r"not its first ones, but that group is nested"):
        ran(model="depth_resnet", recipe="depthfl", policy=last_stage, fleet="1x1")


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


X, Y = torch.rand(40, 64), torch.arange(40) % 10
GOOD = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": Y.int()}, "train.y must be int64"),
        ({"test_y": Y.float()}, "test.y must be int64"),
        (
            {"train_y": Y[:-1]},
            "train.y must have a label for each of the 40 rows of train.x; got 39",
        ),
        ({"train_y": Y + 1}, "train.y must be labels 0 to 9; got 10"),
        ({"test_y": Y - 1}, "test.y must be labels 0 to 9; got -1"),
        (
            {"test_x": X[:, :60]},
            r"test.x must have rows of the shape of train.x's, \(64,\); got \(60,\)",
        ),
        (
            {"test_x": X.double()},
            "test.x must have the type of train.x, torch.float32; got torch.float64",
        ),
        ({"test_x": X[:0], "test_y": Y[:0]}, "test.x must have rows"),
        (
            {"owner": torch.zeros(3, dtype=torch.int64)},
            "owner must have an entry for each of the 40 rows",
        ),
    ],
)
def test_dataset_made_by_hand_is_checked_before_training(changes, message):
    arrays = {**GOOD, **changes}
    dataset = fc.Dataset(
        "mine",
        Samples(arrays["train_x"], arrays["train_y"]),
        Samples(arrays["test_x"], arrays["test_y"]),
        10,
        arrays.get("owner"),
    )
    with pytest.raises(InvalidValue, match=message):
        fc.run(fc.Experiment(**{**SMALL, "clients": 4}), machine=HERE, dataset=dataset)


def test_hold_out_notices_changed_data():
    """Splits are remembered, but not beyond a change of the data."""
    dataset = fc.Dataset("mine", Samples(X.clone(), Y), Samples(X, Y), 10)
    hold_out(dataset, 0.1, 0)
    dataset.train.x.zero_()
    rest, held_out = hold_out(dataset, 0.1, 0)
    assert not rest.train.x.any()
    assert not held_out.x.any()


# ── privacy ───────────────────────────────────────────────────────────────────────────────────────


def test_private_round_is_not_replayed(tmp_path):
    """Its noise would be drawn anew, and the mean over many replays would have none."""
    private = {
        "privacy": "gaussian(noise=4.0)",
        "clip_updates": 0.1,
        "policy": "full",
        "fleet": "1x1",
    }
    ran(tmp_path / "run", keep_rounds=[0], **private)
    with pytest.raises(InvalidValue, match=r"privacy: .*cannot be run again"):
        fc.replay(tmp_path / "run", 0)


# ── names, places, locks ──────────────────────────────────────────────────────────────────────────


def test_declared_fleet_of_a_tiny_capacity_can_be_parsed():
    nodes = [NodeInfo(1, 0, 2, 1.0, "1"), NodeInfo(2, 1, 2, 5e-05, "1")]
    assert Fleet.parse(declared_fleet(nodes, 8, [1.0] * 8)).capacities == (1.0, 5e-05)


def test_sweep_run_names_are_short_and_distinct():
    long = {
        "policy": ['planned(kind="pruning", gamma=1)', "prefix"],
        "model": ["mlp(hidden=[16, 16])", "cnn"],
        "partition": ["dirichlet(alpha=0.1)", "iid"],
    }
    names = [e.name for e in expand_choices(fc.Experiment(), long, seeds=2)]
    assert len(set(names)) == 16
    assert all(len(name) <= 100 and name[-7:] in ("-seed-0", "-seed-1") for name in names)
    assert names == [e.name for e in expand_choices(fc.Experiment(), long, seeds=2)]


def test_sweep_notices_a_process_killed_within_a_line(tmp_path, monkeypatch):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\ncat > /dev/null\nprintf '{\"finished\": [0, [{'\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    experiments = [fc.Experiment(**SMALL, name=f"run{n}", seed=n) for n in range(2)]
    with pytest.raises(RunError, match="a process of the sweep ended with -9"):
        list(fc.sweep(experiments, machine=fc.Machine(device="cpu", processes=2)))


def test_reader_of_a_run_does_not_block_its_resume(tmp_path, monkeypatch):
    ran(tmp_path / "run")
    with (tmp_path / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        waits = []

        def release(delay):
            waits.append(delay)
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(locks.time, "sleep", release)
        with Folder(tmp_path / "run").opened() as opened:
            assert opened.experiment.rounds == 2
    assert len(waits) == 1


# ── what a client says that it measured ───────────────────────────────────────────────────────────


def test_client_cannot_widen_the_common_mask():
    """PruneFL's next mask is made of what clients say that they trained, which the server knows."""
    both = {"policy": "prunefl(every=2)", "recipe": "prunefl(every=2)", "model": "mlp(hidden=[16])"}
    setup = prepare(fc.Experiment(**{**SMALL, **both}), HERE.resolved())
    state = initial_state(setup)
    [(client, part), *_] = rounds_ask(setup, state).work
    task, [update] = setup.task, setup.engine(setup.task, state, [(client, part)], 0.1)

    def answered(arrays):
        pending = pending_task("nonce", task, state, client, part)
        return validate_reply(
            RawReply("nonce", client.id, unpack_arrays(pack_arrays(arrays)), {"loss": 1.0}), pending
        )

    honest = pack_update(update)
    assert isinstance(answered(honest), Update)
    lies = [name for name in honest if name.startswith("measured/trained_in")]
    assert lies
    for name in lies:
        assert answered({**honest, name: np.ones_like(honest[name])}).reason == "mask over capacity"
        assert answered({**honest, name: 5 * honest[name]}).reason == "mask over capacity"
