"""Sweeps: every run is what it would be alone, and a sweep that was stopped goes on."""

import json
from importlib import import_module

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.cli.variations import choices_of
from fedcover.errors import FedcoverError, InvalidValue
from fedcover.runs.api import load
from fedcover.runs.mps import MPS, QUEUES, mps_environment
from fedcover.runs.sweep import choose_num_processes, expand_choices, sweep
from fedcover.training.engines.compilation import eager_backend

BASE = {
    "clients": 20,
    "active": 4,
    "rounds": 3,
    "epochs": 1,
    "model": "mlp(hidden=[8])",
    "assignment": "slot",
}
FIGURES = ("accuracy", "loss", "train_loss", "gamma_round", "histogram", "delta2_mean")


def alike(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for name in FIGURES:
            assert one.get(name) == pytest.approx(other.get(name), rel=1e-4), name


def settings(**fields):
    base = fc.Experiment(**BASE, fleet="1x1 + 1x0.5", checkpoint_every=10, **fields)
    return expand_choices(base, {"policy": ["prefix", "magnitude"], "lr": [0.05, 0.01]}, seeds=2)


CREWS = fc.Machine(engine="batched")


@pytest.fixture
def uncompiled(monkeypatch):
    """What is compiled is tested elsewhere, and takes long."""
    monkeypatch.setattr(
        import_module("fedcover.training.engines.batched"), "inductor_backend", eager_backend
    )


@pytest.mark.parametrize("partition", ["iid", "dirichlet(alpha=0.3)"])
@pytest.mark.parametrize("machine", [None, CREWS])
def test_sweep_runs_equal_runs_alone(machine, partition, uncompiled):
    experiments = settings(partition=partition)
    metrics_by_name = {
        run.experiment.name: run.metrics for run in sweep(experiments, machine=machine)
    }
    assert list(metrics_by_name) == [e.name for e in experiments]
    for experiment in experiments:
        alike(
            metrics_by_name[experiment.name],
            fc.run(experiment, machine=fc.Machine(engine="sequential")).metrics,
        )


class Shuffled(nn.Module):
    """Draws more than its weights when it is made."""

    def __init__(self):
        super().__init__()
        self.order, self.output = torch.randperm(64).tolist(), nn.Linear(64, 10)

    def forward(self, x):
        return self.output(x.flatten(1)[:, self.order])


def shuffled(shape, classes, norm):
    return fc.Model(Shuffled(), ())


def test_sweep_runs_do_not_share_modules(uncompiled):
    base = fc.Experiment(
        **{**BASE, "model": "tests.runs.test_sweep:shuffled"}, policy="full", fleet="1x1"
    )
    for run in sweep(expand_choices(base, {}, seeds=3), machine=CREWS):
        alike(run.metrics, fc.run(run.experiment, machine=fc.Machine(engine="sequential")).metrics)


def test_crews_span_runs_of_a_sweep(monkeypatch, uncompiled):
    sizes = []
    from fedcover.training.engines import workspace

    load_clients = workspace.StepWorkspace.load

    def counting(self, clients):
        sizes.append(len(clients))
        load_clients(self, clients)

    monkeypatch.setattr(workspace.StepWorkspace, "load", counting)
    list(
        sweep(
            expand_choices(fc.Experiment(**BASE, policy="full", fleet="1x1"), {}, seeds=5),
            machine=CREWS,
        )
    )
    assert max(sizes) >= 10  # five runs of four clients, of which not all have equally many rows


def test_sweep_of_different_lengths_and_models():
    experiments = [
        fc.Experiment(
            **{**BASE, "rounds": rounds, "model": model},
            name=f"{model[:3]}{rounds}",
            policy="full",
            fleet="1x1",
        )
        for rounds in (1, 3)
        for model in ("mlp(hidden=[8])", "cnn(channels=[2, 2], hidden=4)")
    ]
    metrics_by_name = {run.experiment.name: len(run.metrics) for run in sweep(experiments)}
    assert metrics_by_name == {e.name: e.rounds for e in experiments}


@pytest.mark.parametrize("partition", ["iid", "dirichlet(alpha=0.3)"])
def test_diverged_run_of_a_sweep_leaves_the_others(partition, uncompiled):
    base = fc.Experiment(**BASE, policy="full", fleet="1x1", partition=partition)
    metrics_by_name = list(
        sweep(expand_choices(base, {"lr": [0.05, 1e30]}, seeds=1), machine=CREWS)
    )
    diverged = {run.experiment.lr: run.diverged for run in metrics_by_name}
    assert diverged[0.05] == ""
    assert "diverged" in diverged[1e30]
    assert [len(run.metrics) for run in metrics_by_name if not run.diverged] == [3]


def test_sweep_of_runs_that_cannot_be_stacked(uncompiled):
    base = fc.Experiment(
        **{**BASE, "model": "mlp(hidden=[8], dropout=0.5)"}, policy="full", fleet="1x1"
    )
    for run in sweep(expand_choices(base, {}, seeds=2), machine=CREWS):
        alike(run.metrics, fc.run(run.experiment, machine=fc.Machine(engine="sequential")).metrics)


def test_stopped_sweep_is_resumed(tmp_path):
    experiments = settings()[:4]
    whole = {run.experiment.name: run.metrics for run in sweep(experiments)}

    def stop(experiment, report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep(experiments, tmp_path, watch=stop))
    assert (
        load(tmp_path / experiments[0].name).state.round == 2
    )  # kept, although no checkpoint was due
    for run in sweep(experiments, tmp_path):
        alike(run.metrics, whole[run.experiment.name])
        assert load(tmp_path / run.experiment.name).state.round == 3
    again = {
        run.experiment.name: run.metrics for run in sweep(experiments, tmp_path)
    }  # all there, nothing is run
    assert again.keys() == whole.keys()


@pytest.mark.parametrize("machine", [None, fc.Machine(processes=2)], ids=["one process", "two"])
def test_stopped_sweep_writes_missing_summaries(tmp_path, machine):
    experiments = settings()[:2]

    def stop(experiment, report):
        if report.round == 2:  # the last
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep(experiments, tmp_path, watch=stop))
    summaries = [tmp_path / e.name / "summary.json" for e in experiments]
    assert load(tmp_path / experiments[0].name).state.round == 3
    assert not summaries[0].exists()
    list(sweep(experiments, tmp_path, machine=machine))
    assert [json.loads(path.read_text())["rounds"] for path in summaries] == [3, 3]


def test_folder_of_another_experiment_is_refused(tmp_path):
    experiment = fc.Experiment(**BASE, policy="full", fleet="1x1", name="same")
    list(sweep([experiment], tmp_path))
    with pytest.raises(InvalidValue, match="holds another experiment"):
        list(sweep([experiment.model_copy(update={"lr": 0.5})], tmp_path))


def test_runs_of_another_precision_are_refused(tmp_path):
    experiment = fc.Experiment(**BASE, policy="full", fleet="1x1", name="same")
    list(sweep([experiment], tmp_path))
    with pytest.raises(InvalidValue, match="was run with precision fp32, not bf16; choose another"):
        list(sweep([experiment], tmp_path, machine=fc.Machine(precision="bf16")))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"seed": [1, 2]}, "vary must not be of seed"),
        ({"name": ["a", "b"]}, "vary must not be of name"),
        ({"lr": [0.1, 0.1]}, r"vary must name each value of lr once; got 0\.1 \| 0\.1$"),
        (
            {("lr", "momentum"): [(0.1, 0.5), (0.1, 0.5)]},
            r"vary must name each value of lr, momentum once; got 0\.1, 0\.5 \| 0\.1, 0\.5$",
        ),
    ],
)
def test_runs_of_equal_names_are_refused(choices, message):
    with pytest.raises(InvalidValue, match=message):
        expand_choices(fc.Experiment(), choices, seeds=1)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (
            "policy=prefix,norm=batch|policy=rolling,norm=group",
            {("policy", "norm"): [("prefix", "batch"), ("rolling", "group")]},
        ),
        (
            "policy=rolling(spread=true)|regions(codename='14', kind=pruning)",
            {("policy",): [("rolling(spread=true)",), ("regions(codename='14', kind=pruning)",)]},
        ),
        (
            "norm=batch, keep_rounds=[0, 2]|keep_rounds=[1],norm=group",
            {("norm", "keep_rounds"): [("batch", [0, 2]), ("group", [1])]},
        ),
        ("lr=0.1|lr=0.2", {("lr",): [(0.1,), (0.2,)]}),
        (
            "partition=mine:own(a='x|y', b=2)|iid",
            {("partition",): [("mine:own(a='x|y', b=2)",), ("iid",)]},
        ),
    ],
)
def test_vary_option_is_parsed(text, choices):
    assert choices_of([text]) == choices


def test_tied_fields_vary_together():
    base = fc.Experiment(**{**BASE, "name": "t"}, fleet="1x1 + 1x0.5")
    choices = choices_of(["policy=prefix,norm=batch|policy=rolling,norm=group", "lr=0.1|0.2"])
    assert [(e.policy, e.norm, e.lr) for e in expand_choices(base, choices, seeds=1)] == [
        ("prefix", "batch", 0.1),
        ("prefix", "batch", 0.2),
        ("rolling", "group", 0.1),
        ("rolling", "group", 0.2),
    ]
    assert (
        expand_choices(base, choices, seeds=1)[0].name == "t-policy-prefix-norm-batch-lr-0.1-seed-0"
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["policy=prefix,norm=batch|policy=rolling"],
            "must give all of policy, norm in each setting; got 'policy=rol",
        ),
        (
            ["policy=prefix,norm=batch|rolling"],
            "must give all of policy, norm in each setting; got 'rolling'",
        ),
        (["lr=0.1,norm=batch|lr=0.2,norm=group", "norm=batch"], "name each field once"),
        (["lr=0.1,seed=1|lr=0.2,seed=2"], "vary must not be of seed"),
        (["lr=0.1,norm=batch|lr=0.1,norm=batch"], "name each value of lr, norm once"),
        (["lr"], "must look like key=value"),
    ],
)
def test_vary_option_refuses_wrong_text(texts, message):
    with pytest.raises(InvalidValue, match=message):
        expand_choices(fc.Experiment(), choices_of(texts), seeds=1)


def test_sweep_needs_a_seed():
    with pytest.raises(InvalidValue, match="seeds must be at least 1; got 0"):
        expand_choices(fc.Experiment(), {}, seeds=0)


TWO = fc.Machine(processes=2)


def test_sweep_in_two_processes_equals_one(tmp_path):
    experiments = settings()[:4]
    rounds = []
    metrics_by_name = {
        run.experiment.name: run.metrics
        for run in sweep(
            experiments,
            tmp_path,
            machine=TWO,
            watch=lambda e, report: rounds.append((e.name, report.round)),
        )
    }
    assert sorted(rounds) == sorted((e.name, round) for e in experiments for round in range(3))
    for run in sweep(experiments):
        alike(metrics_by_name[run.experiment.name], run.metrics)
        assert load(tmp_path / run.experiment.name).state.round == 3


@pytest.mark.system
def test_stopped_sweep_processes_keep_their_rounds(tmp_path):
    experiments = settings()[:2]

    processes = []

    def stop(experiment, report):
        processes.append(experiment.name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(sweep(experiments, tmp_path, machine=TWO, watch=stop))
    assert load(tmp_path / processes[0]).state.round >= 1  # kept, although no checkpoint was due
    assert [len(run.metrics) for run in sweep(experiments, tmp_path, machine=TWO)] == [3, 3]


def test_error_in_a_sweep_process_is_raised_here():
    experiments = [e.model_copy(update={"policy": "no_such_module:policy"}) for e in settings()[:2]]
    with pytest.raises(FedcoverError, match="no_such_module"):
        list(sweep(experiments, machine=TWO))


def test_sweep_processes_auto_depends_on_the_work():
    auto = fc.Machine(processes="auto").resolved()
    assert choose_num_processes(settings(), auto) == 1
    long = [e.model_copy(update={"rounds": 1000}) for e in settings()]
    assert 1 <= choose_num_processes(long, auto) <= len(long)
    assert choose_num_processes(long[:1], auto) == 1


@pytest.mark.parametrize(("processes", "queues"), [(2, "32"), (8, "8"), (100, "2")])
def test_processes_on_one_gpu_share_its_queues(processes, queues, tmp_path, monkeypatch):
    server = tmp_path / MPS
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv(QUEUES, raising=False)
    with mps_environment(processes) as environment:
        assert environment[QUEUES] == queues
    monkeypatch.setenv(QUEUES, "5")
    with mps_environment(processes) as environment:
        assert environment[QUEUES] == "5"  # who has asked is not overruled


def test_processes_without_mps_server_keep_their_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps_environment(8) as environment:
        assert QUEUES not in environment
        assert "CUDA_MPS_PIPE_DIRECTORY" not in environment
