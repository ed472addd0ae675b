"""Runs: the same in memory and in a folder, reproducible, and what the folder holds."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import RunSession
from fedcover.server.round import RoundReport
from tests.helpers.python_parts import own_model, small_dataset
from tests.helpers.runs import assert_equal, figures, tiny


def test_run_in_memory_equals_run_in_a_folder(finished):
    in_memory = fc.run(tiny())
    assert in_memory.folder is None
    assert figures(in_memory) == figures(finished)
    assert_equal(in_memory.state.params, fc.load(finished).state.params)


def test_metrics_of_a_run_in_a_folder_are_not_kept_in_memory(tmp_path):
    """Of many clients over many rounds they would be much."""
    before = fc.run(tiny(rounds=1), tmp_path / "run", machine=fc.Machine("sequential", "cpu"))
    with Folder(tmp_path / "run").opened() as folder:
        course = RunSession(tiny(), before.setup, before.state, before.metrics, folder)
        next_line = {**before.metrics[0], "round": 1, "accuracy": 0.5}
        course.record_round(
            replace(before.state, round=2),
            RoundReport(1, {k: v for k, v in next_line.items() if k != "round"}),
        )
        assert course.metrics_in_memory == []
        assert course.metrics == [*before.metrics, next_line]


def test_runs_in_one_process_do_not_affect_each_other():
    prefix, random = tiny(rounds=2), tiny(rounds=2, policy="random", seed=1)
    first = [fc.run(prefix), fc.run(random)]
    second = [fc.run(random), fc.run(prefix)][::-1]
    for one, other in zip(first, second, strict=True):
        assert figures(one) == figures(other)
        assert_equal(one.state.params, other.state.params)
    data, model = small_dataset(), own_model()
    initial_params = {name: p.clone() for name, p in model.module.named_parameters()}
    shared = [fc.run(tiny(rounds=2), dataset=data, model=model) for _ in range(2)]
    assert figures(shared[0]) == figures(shared[1])
    assert_equal(initial_params, dict(model.module.named_parameters()))


def test_nested_runs_do_not_affect_each_other():
    inner = []
    outer = fc.run(
        tiny(rounds=2), watch=lambda report: inner.append(fc.run(tiny(rounds=2, seed=5)))
    )
    assert figures(outer) == figures(fc.run(tiny(rounds=2)))
    assert figures(inner[0]) == figures(inner[1]) == figures(fc.run(tiny(rounds=2, seed=5)))


def test_run_depends_on_the_seed_alone():
    runs = [fc.run(tiny(rounds=2, seed=seed)) for seed in (3, 3, 4)]
    assert_equal(runs[0].state.params, runs[1].state.params)
    assert figures(runs[0]) == figures(runs[1]) != figures(runs[2])
    assert not torch.equal(runs[0].state.params["head.weight"], runs[2].state.params["head.weight"])


def test_run_restores_random_state_and_threads():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    numpy_before = np.random.get_state()[1].copy()
    random_states = []
    fc.run(
        tiny(rounds=2),
        machine=fc.Machine(threads=2),
        watch=lambda report: random_states.append(torch.get_num_threads()),
    )
    assert random_states == [2, 2]
    assert torch.get_num_threads() == threads
    with pytest.raises(fc.FedcoverError, match="diverged"):
        fc.run(tiny(lr=1e20), machine=fc.Machine(threads=2))
    assert torch.get_num_threads() == threads
    assert torch.equal(before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


def test_experiment_and_manifest_are_read_back(finished):
    text = (finished / "experiment.toml").read_text()
    assert fc.Experiment.from_toml(text) == tiny(keep_rounds=(0, 2, 3))
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert manifest["engine"] == "sequential"
    assert manifest["threads"] == 1
    assert manifest["precision"] == "fp32"
    assert manifest["fedcover"] == fc.__version__
    assert manifest["torch"] == torch.__version__
    assert manifest["numpy"] == np.__version__
    assert manifest["experiment"] == tiny().digest
    assert manifest.keys() >= {
        "commit",
        "device",
        "python",
        "system",
        "hardware",
        "created",
        "custom",
    }


def test_metrics_have_one_complete_line_per_round(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert 0 <= line["accuracy"] <= 1
        assert line["loss"] > 0
        assert 0 <= line["gamma_round"] <= line["gamma_window"]
        assert sum(line["histogram"].values()) == 64 * 16 + 16 + 160 + 10
        assert len(line["clients"]) == 4
        assert {client["capacity"] for client in line["clients"].values()} <= {1.0, 0.5}
        assert all(
            (client["delta2"] == 0) == (client["capacity"] == 1)
            for client in line["clients"].values()
        )
        assert line["seconds"].keys() == {
            "policy",
            "training",
            "aggregation",
            "measuring",
            "evaluation",
        }
        assert line["bytes_down"] > line["bytes_up"] == 4 * 4 * line["parameters"]
        assert 0 < line["multiply_adds"] < line["parameters"]


def test_summary_follows_from_the_metrics(finished):
    lines, summary = figures(finished), json.loads((finished / "summary.json").read_text())
    assert summary["accuracy"] == lines[-1]["accuracy"]
    assert summary["loss"] == lines[-1]["loss"]
    assert summary["gamma_min"] == min(line["gamma_round"] for line in lines)
    assert summary["gamma_window"] == lines[-1]["gamma_window"]
    assert summary["delta2_mean"] == pytest.approx(np.mean([line["delta2_mean"] for line in lines]))
    assert summary["rounds"] == 4
    assert summary["seconds"] > 0
    assert "accuracy_best" not in summary
    run = fc.load(finished)
    assert (run.accuracy, run.gamma_min, run.summary) == (
        summary["accuracy"],
        summary["gamma_min"],
        summary,
    )


def test_best_round_is_chosen_on_validation_data():
    run = fc.run(tiny(validation=0.2, rounds=3, lr=0.5))
    best = max(run.metrics, key=lambda line: line["validation_accuracy"])
    assert run.summary["accuracy_best"] == best["accuracy"]
    assert run.summary["best_round"] == best["round"]


def test_run_without_answers_finishes(tmp_path):
    run = fc.run(tiny(drop_out=0.999, active=1, rounds=2), tmp_path / "silent")
    assert run.summary["gamma_min"] == 0
    assert run.summary["delta2_mean"] is None
    assert [line["train_loss"] for line in run.metrics] == [None, None]
    assert len(run.metrics[0]["dropped"]) == 1
    assert fc.load(tmp_path / "silent").summary == run.summary


def test_run_keeps_the_two_newest_checkpoints(finished):
    assert [file.round for file in list_checkpoints(finished / "checkpoints")] == [4, 3]
    assert len(list((finished / "checkpoints").iterdir())) == 2


def test_accuracy_before_any_evaluation_is_an_error(tmp_path):
    def stop(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(evaluate_every=3), tmp_path / "run", watch=stop)
    stopped = fc.load(tmp_path / "run")
    assert stopped.state.round == 1
    with pytest.raises(RunError, match="not been evaluated"):
        stopped.accuracy  # noqa: B018
