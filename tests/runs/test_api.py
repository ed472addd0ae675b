"""Runs: the same in memory and in a folder, what the folder holds, replay, export, and going on in Python."""

import copy
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs import checkpoints
from fedcover.runs.checkpoints import copy_to_cpu, list_checkpoints
from fedcover.runs.export import export
from fedcover.runs.run_folder import Folder
from fedcover.runs.session import RunSession
from fedcover.server.round import RoundReport, run_round
from fedcover.tensors import flatten
from tests.helpers.runs import RESNET, assert_same_end, figures, last_checkpoint, tiny
from tests.helpers.worlds import same, world


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def half_then_whole(view: fc.View) -> list[fc.Slices]:
    """A policy of one's own: windows that grow in the second round."""
    return [
        fc.windows(view.groups, client.capacity * (0.5 if view.round < 1 else 1.0))
        for client in view.cohort
    ]


def small_dataset() -> fc.Dataset:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(90, 6)).astype(np.float32), draw.integers(3, size=90)
    return fc.from_tensors((x[:60], y[:60]), (x[60:], y[60:]))


def own_model() -> fc.Model:
    torch_model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    cuts = (fc.Cut("0.weight", 0), fc.Cut("0.bias", 0), fc.Cut("2.weight", 1))
    return fc.Model(torch_model, (fc.UnitGroup("inner", 8, cuts),), ("0.weight",))


pytestmark = pytest.mark.usefixtures("only_the_cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished tiny run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fc.run(tiny(keep_rounds=(0, 2, 3)), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A finished tiny run to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


# ── equal in every way ──────────────────────────────────────────────────────────────────────────────────


def test_a_run_in_memory_equals_the_same_run_into_a_folder(finished):
    in_memory = fc.run(tiny())
    assert in_memory.folder is None
    assert figures(in_memory) == figures(finished)
    assert_equal(in_memory.state.params, fc.load(finished).state.params)


def test_the_figures_of_a_run_in_a_folder_are_not_kept_in_memory_too(tmp_path):
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


def test_two_runs_in_one_process_do_not_touch_each_other():
    prefix, random = tiny(rounds=2), tiny(rounds=2, policy="random", seed=1)
    first = [fc.run(prefix), fc.run(random)]
    second = [fc.run(random), fc.run(prefix)][::-1]
    for one, other in zip(first, second, strict=True):
        assert figures(one) == figures(other)
        assert_equal(one.state.params, other.state.params)
    data, model = small_dataset(), own_model()
    given = {name: p.clone() for name, p in model.module.named_parameters()}
    shared = [fc.run(tiny(rounds=2), dataset=data, model=model) for _ in range(2)]
    assert figures(shared[0]) == figures(shared[1])
    assert_equal(given, dict(model.module.named_parameters()))


def test_one_run_inside_another_changes_neither():
    inner = []
    outer = fc.run(
        tiny(rounds=2), watch=lambda report: inner.append(fc.run(tiny(rounds=2, seed=5)))
    )
    assert figures(outer) == figures(fc.run(tiny(rounds=2)))
    assert figures(inner[0]) == figures(inner[1]) == figures(fc.run(tiny(rounds=2, seed=5)))


def test_the_seed_decides_every_bit():
    runs = [fc.run(tiny(rounds=2, seed=seed)) for seed in (3, 3, 4)]
    assert_equal(runs[0].state.params, runs[1].state.params)
    assert figures(runs[0]) == figures(runs[1]) != figures(runs[2])
    assert not torch.equal(runs[0].state.params["head.weight"], runs[2].state.params["head.weight"])


def test_a_run_leaves_the_global_random_state_and_the_threads_alone():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    numpy_before = np.random.get_state()[1].copy()
    seen = []
    fc.run(
        tiny(rounds=2),
        machine=fc.Machine(threads=2),
        watch=lambda report: seen.append(torch.get_num_threads()),
    )
    assert seen == [2, 2]
    assert torch.get_num_threads() == threads
    with pytest.raises(fc.FedcoverError, match="diverged"):
        fc.run(tiny(lr=1e20), machine=fc.Machine(threads=2))
    assert torch.get_num_threads() == threads
    assert torch.equal(before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


# ── what the folder holds ───────────────────────────────────────────────────────────────────────────────


def test_the_experiment_and_the_manifest_read_back(finished):
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


def test_metrics_have_one_line_a_round_with_every_figure(finished):
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


def test_the_summary_follows_from_the_metrics(finished):
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


def test_the_best_round_is_chosen_on_validation_data():
    run = fc.run(tiny(validation=0.2, rounds=3, lr=0.5))
    best = max(run.metrics, key=lambda line: line["validation_accuracy"])
    assert run.summary["accuracy_best"] == best["accuracy"]
    assert run.summary["best_round"] == best["round"]


def test_rounds_in_which_nobody_answers_are_runs_too(tmp_path):
    run = fc.run(tiny(drop_out=0.999, active=1, rounds=2), tmp_path / "silent")
    assert run.summary["gamma_min"] == 0
    assert run.summary["delta2_mean"] is None
    assert [line["train_loss"] for line in run.metrics] == [None, None]
    assert len(run.metrics[0]["dropped"]) == 1
    assert fc.load(tmp_path / "silent").summary == run.summary


def test_only_the_two_newest_checkpoints_stay_and_nothing_is_left_beside_them(finished):
    assert [file.round for file in list_checkpoints(finished / "checkpoints")] == [4, 3]
    assert len(list((finished / "checkpoints").iterdir())) == 2


def test_what_was_fetched_of_a_state_before_is_used_again_and_nothing_else():
    setup, start = world("mlp", policy="rolling")
    first, _ = run_round(setup, start)
    second, _ = run_round(setup, first)
    before, alone = copy.deepcopy(copy_to_cpu(first)), copy_to_cpu(second)
    again = copy_to_cpu(second, (first, before))
    assert again.round == 2
    same(again.params, alone.params)
    same(again.coverage.ever, alone.coverage.ever)
    assert len(again.coverage.window) == len(alone.coverage.window) == 2
    for old, new in zip(again.coverage.window, alone.coverage.window, strict=True):
        same(old, new)
    assert all(
        again.coverage.window[0][name] is before.coverage.window[0][name] for name in again.params
    )


def test_all_that_a_state_holds_is_read_again(tmp_path):
    state, _ = run_round(*world("mlp", policy="rolling"))
    kinds = {
        kind: {
            key: {name: torch.full((2,), place + 0.5) for place, name in enumerate(["b/x", "a.y"])}
            for key in keys
        }
        for kind, keys in {
            "statistics": ["1.0", "0.5"],
            "measured": ["heat"],
            "server": ["momentum"],
        }.items()
    }
    private = {12: {"units": torch.tensor([True, False])}, 3: {"units": torch.tensor([False])}}
    whole = replace(state, round=7, private=private, **kinds)
    checkpoints.save_checkpoint(tmp_path, whole, "an experiment")
    again, complaints = checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    assert not complaints
    for there in (again, copy_to_cpu(whole)):
        assert there.round == 7
        same(there.params, whole.params)
        same(there.coverage.ever, whole.coverage.ever)
        same(there.coverage.window[0], whole.coverage.window[0])
        for kind in ("statistics", "measured", "server", "private"):
            known = getattr(whole, kind)
            assert list(getattr(there, kind)) == list(known)
            for key, tensors in known.items():
                same(getattr(there, kind)[key], tensors)


def test_a_state_before_any_round_is_read_again(tmp_path):
    _, state = world("mlp", policy="rolling")
    state = replace(
        state, params={**state.params, "a/name": torch.ones(2), "a/longer/name": torch.ones(1)}
    )
    checkpoints.save_checkpoint(tmp_path, state, "an experiment")
    again, _ = checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    same(again.params, state.params)
    assert list(again.params) == list(state.params)
    assert (again.round, again.coverage.window, again.coverage.ever) == (0, (), {})


def test_a_server_may_remember_one_tensor_under_two_names(tmp_path):
    setup, state = world("mlp", policy="rolling")
    twice = replace(
        setup, server=lambda tensor, memory: (tensor.new, dict.fromkeys("ab", tensor.old * 2))
    )
    after, _ = run_round(twice, state)
    checkpoints.save_checkpoint(tmp_path, after, "an experiment")
    again, _ = checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    for name in "ab":
        same(again.server[name], after.server[name])


def test_as_many_checkpoints_are_left_as_are_kept(tmp_path):
    _, state = world("mlp", policy="rolling")
    for round in range(5):
        path = checkpoints.save_checkpoint(
            tmp_path, replace(state, round=round), "an experiment", keep=3
        )
    assert [file.round for file in list_checkpoints(tmp_path)] == [4, 3, 2]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(
        RunError,
        match=rf"^checkpoint {path} is damaged: its digest is \w+, not {path.name[13:29]}$",
    ):
        checkpoints.load_checkpoint(list_checkpoints(tmp_path)[0], "an experiment", "cpu")


@pytest.mark.parametrize(
    "order", [None, 7, {"params/w": 1}, [], ["params/w", "params/b"], ["params/b"], [["params/w"]]]
)
def test_a_checkpoint_must_say_in_which_order_its_tensors_are(tmp_path, order):
    about = json.dumps({"experiment": "an experiment", "round": 0, "order": order})
    content = safetensors.torch.save({"params/w": torch.ones(2)}, metadata={"fedcover": about})
    path = tmp_path / f"round-000000.{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=rf"^checkpoint {path} does not say in which order its tensors are$"
    ):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")


@pytest.mark.parametrize("metadata", [None, {"made": "elsewhere"}])
def test_tensors_from_elsewhere_are_no_checkpoint(tmp_path, metadata):
    content = safetensors.torch.save({"params/w": torch.ones(2)}, metadata=metadata)
    path = tmp_path / f"round-000000.{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    assert list_checkpoints(tmp_path)[0].line() is None
    with pytest.raises(RunError, match=rf"^checkpoint {path} belongs to another experiment: None$"):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")


def test_only_what_is_half_written_is_swept_away(tmp_path):
    kept = [".hidden.txt", ".git.1", "a.json", "round-000001.safetensors.12", ".a.json.x"]
    for name in [*kept, ".round-000001.0a.safetensors.12", ".a.json.7", ".a.jsonl.77", ".a.toml.1"]:
        (tmp_path / name).touch()
    checkpoints.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_every_damaged_checkpoint_is_told_of(tmp_path):
    with pytest.raises(RunError, match=f"^there is no checkpoint in {tmp_path}$"):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    _, state = world("mlp", policy="rolling")
    for round in (3, 4):
        checkpoints.save_checkpoint(tmp_path, replace(state, round=round), "an experiment")
    with pytest.raises(
        RunError, match=r"-000004\..*: 'an experiment'; checkpoint .*-000003\..*: 'an experiment'$"
    ):
        checkpoints.load_newest(tmp_path, "another", "cpu")


def test_a_line_of_figures_is_kept_with_its_state(tmp_path):
    _, state = world("mlp", policy="rolling")
    for line in ({"round": 0, "loss": 0.5}, None):
        checkpoints.save_checkpoint(tmp_path, state, "an experiment", line=line)
        assert [file.line() for file in list_checkpoints(tmp_path)] == [line]
        list_checkpoints(tmp_path)[0].path.unlink()
    checkpoints.save_checkpoint(tmp_path, state, "an experiment", line=["no line"])
    assert [file.line() for file in list_checkpoints(tmp_path)] == [None]


def test_a_checkpoint_that_is_set_aside_is_none_any_more(tmp_path):
    _, state = world("mlp", policy="rolling")
    path = checkpoints.save_checkpoint(tmp_path, state, "an experiment")
    content = path.read_bytes()
    checkpoints.set_aside(path)
    assert list_checkpoints(tmp_path) == []
    assert [(left.name, left.read_bytes()) for left in tmp_path.iterdir()] == [
        (f"{path.name}.unusable", content)
    ]
    with pytest.raises(RunError, match=rf"^cannot rename {path}: No such file or directory$"):
        checkpoints.set_aside(path)


def test_accuracy_before_any_evaluation_is_a_sentence(tmp_path):
    def stop(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(evaluate_every=3), tmp_path / "run", watch=stop)
    stopped = fc.load(tmp_path / "run")
    assert stopped.state.round == 1
    with pytest.raises(RunError, match="not been evaluated"):
        stopped.accuracy  # noqa: B018


# ── going on, replaying ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value"), [("engine", "other"), ("threads", 3), ("device", "cuda"), ("torch", "1.0.0")]
)
def test_resume_refuses_another_machine_unless_forced(copied, key, value):
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    now = fc.Machine(engine="sequential", device="cpu", threads=1)
    with pytest.raises(RunError, match=f"would change {key} {value} to .*--force"):
        fc.resume(copied, machine=now)
    assert fc.resume(copied, machine=now, force=True).state.round == 4


def test_the_manifest_tells_when_a_run_went_on_in_another_way(tmp_path):
    def stop(report):
        if report.round in (0, 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(
            tiny(rounds=4), tmp_path / "run", machine=fc.Machine("sequential", "cpu", 1), watch=stop
        )
    with pytest.raises(KeyboardInterrupt):
        fc.resume(tmp_path / "run", machine=fc.Machine(threads=2), force=True, watch=stop)
    fc.resume(tmp_path / "run")  # as it went on last, without a word
    (told,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["resumed"]
    assert (told["round"], told["threads"]) == (1, 2)
    with pytest.raises(RunError, match="would change threads 2 to 1"):
        fc.resume(tmp_path / "run", machine=fc.Machine(threads=1))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b'{"engine": 1}', b'{"engine": "sequential"}']
)
def test_a_damaged_manifest_is_refused_by_name(copied, content):
    (copied / "manifest.json").write_bytes(content)
    with pytest.raises(RunError, match=r"manifest\.json"):
        fc.resume(copied)


def test_resume_refuses_no_threads(copied):
    with pytest.raises(InvalidValue, match=r"threads must be in 1\.\.1024; got 0"):
        fc.resume(copied, machine=fc.Machine(threads=0))


def test_a_finished_run_is_only_summarised_again(copied):
    (copied / "summary.json").unlink()
    before = last_checkpoint(copied)
    fc.resume(copied)
    assert last_checkpoint(copied) == before
    assert json.loads((copied / "summary.json").read_text()) == fc.load(copied).summary


def test_python_parts_must_be_given_again(tmp_path):
    parts = {"dataset": small_dataset(), "policy": half_then_whole}
    whole = fc.run(tiny(keep_rounds=(1, 2)), tmp_path / "whole", **parts)

    def image(report):
        if report.round == 1:
            shutil.copytree(tmp_path / "whole2", tmp_path / "stopped")

    fc.run(tiny(), tmp_path / "whole2", watch=image, **parts)
    for act in (fc.resume, fc.load, lambda folder, **given: fc.replay(folder, 1, **given)):
        with pytest.raises(RunError, match=r"its own dataset, policy: give it again"):
            act(tmp_path / "stopped")
        with pytest.raises(RunError, match=r"its own policy: give it again"):
            act(tmp_path / "stopped", dataset=parts["dataset"])
    resumed = fc.resume(tmp_path / "stopped", **parts)
    assert figures(resumed) == figures(whole)
    assert_same_end(tmp_path / "stopped", tmp_path / "whole2")
    _, report = fc.replay(tmp_path / "whole", 1, **parts)
    assert {"round": 1, **report.metrics, "seconds": None} == {**whole.metrics[1], "seconds": None}


def test_a_checkpoint_with_a_tensor_for_each_count_can_still_be_resumed(tmp_path, monkeypatch):
    whole = fc.run(tiny(rounds=4), tmp_path / "whole")
    monkeypatch.setattr(
        checkpoints, "_is_counts", lambda part: False
    )  # as they were written at first

    def stop(report):
        if report.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fc.run(tiny(rounds=4), tmp_path / "run", watch=stop)
    monkeypatch.undo()
    assert any(
        name.count("/") == 2
        for name in safetensors.torch.load(last_checkpoint(tmp_path / "run")[1])
    )
    assert figures(fc.resume(tmp_path / "run")) == figures(whole)


@pytest.mark.parametrize(
    "fields", [{}, {"policy": "random", "drop_out": 0.3}, {"norm": "tracked", **RESNET}]
)
def test_replay_repeats_a_kept_round_exactly(tmp_path, fields):
    experiment = tiny(**fields)
    fc.run(replace_rounds(experiment, (0, 1, 2)), tmp_path / "run")
    for round in (0, 1):
        state, report = fc.replay(tmp_path / "run", round)
        line = figures(tmp_path / "run")[round]
        repeated = json.loads(json.dumps({"round": report.round, **report.metrics}))
        assert {key: value for key, value in repeated.items() if key != "seconds"} == line
        kept = next(
            file for file in list_checkpoints(tmp_path / "run" / "kept") if file.round == round + 1
        )
        stored = safetensors.torch.load_file(kept.path)
        assert_equal(
            {f"params/{name}": t for name, t in state.params.items()}, _part(stored, "params/")
        )
        assert torch.equal(flatten(state.coverage.ever), stored["ever"])


def replace_rounds(experiment: fc.Experiment, rounds: tuple[int, ...]) -> fc.Experiment:
    return fc.Experiment(**{**experiment.model_dump(), "keep_rounds": rounds})


def _part(stored: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}


def test_replay_names_the_kept_rounds(finished, tmp_path):
    with pytest.raises(RunError, match=r"keeps no state of round 1; kept rounds: 0, 2, 3"):
        fc.replay(finished, 1)
    fc.run(tiny(rounds=1), tmp_path / "none")
    with pytest.raises(RunError, match=r"kept rounds: none \(set keep_rounds\)"):
        fc.replay(tmp_path / "none", 0)


# ── taking the model away ───────────────────────────────────────────────────────────────────────────────

EXPORTED = {
    "prefix": {},
    "random": {"policy": "random"},
    "magnitude": {"policy": "magnitude"},
    "pruned regions": {"policy": "regions(codename='1177')", "fleet": "2x1 + 2x0.5"},
    "regions of units": {
        "policy": "regions(codename='1155', kind='subnet')",
        "fleet": "2x1 + 2x0.5",
    },
    "batch norm": RESNET,
    "tracked norm": {"norm": "tracked", **RESNET},
    "width norm": {"norm": "per-width", **RESNET},
}


@pytest.mark.parametrize("fields", EXPORTED.values(), ids=EXPORTED.keys())
def test_an_exported_part_answers_like_the_run_s(tmp_path, fields):
    run = fc.run(tiny(rounds=1) if not fields else tiny(**{**fields, "rounds": 1}))
    test_x = run.setup.task.source.test.x[:50]
    for capacity in (1.0, 0.5):
        path = tmp_path / f"{capacity}.safetensors"
        told = export(run, capacity, path)
        loaded = fc.load_part(path)
        assert not loaded.training
        with torch.no_grad():
            wanted = run.submodel(capacity)(test_x)
            assert torch.equal(loaded(test_x), wanted)
        assert told["stored"] == sum(p.numel() for p in loaded.parameters())
        assert (
            told["parameters"] <= told["stored"] <= sum(p.numel() for p in run.model().parameters())
        )
        if capacity == 1:
            assert torch.equal(run.model()(test_x), wanted)
        else:
            assert told["parameters"] < sum(p.numel() for p in run.model().parameters())


def test_what_cannot_be_exported_is_refused(tmp_path, finished):
    run = fc.load(finished)
    for capacity in (0, -1, 1.5, float("nan")):
        with pytest.raises(InvalidValue, match=r"capacity must be in \(0, 1\]; got"):
            export(run, capacity, tmp_path / "x")
    full = fc.run(tiny(policy="full", rounds=1))
    with pytest.raises(
        InvalidValue, match=r"no part for a device of capacity 0\.5: its policy 'full'"
    ):
        full.submodel(0.5)
    with pytest.raises(RunError, match=r"cannot write .*No such file"):
        export(run, 1.0, tmp_path / "no" / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_export_is_refused(tmp_path, finished):
    garbage, plain = tmp_path / "garbage", tmp_path / "plain.safetensors"
    garbage.write_bytes(b"\x00" * 100)
    safetensors.torch.save_file({"a": torch.zeros(1)}, plain)
    for path in (garbage, tmp_path / "missing", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match="cannot be read"):
            fc.load_part(path)
    for path in (plain, list_checkpoints(finished / "checkpoints")[0].path):
        with pytest.raises(RunError, match="is no model exported by fedcover"):
            fc.load_part(path)


def test_the_part_of_a_model_made_in_python_needs_that_model(tmp_path):
    model, path = own_model(), tmp_path / "part"
    run = fc.run(tiny(rounds=1), dataset=small_dataset(), model=model)
    export(run, 0.5, path)
    with pytest.raises(
        RunError, match=r"does not hold a part of model 'mlp\(hidden=\[16\]\)' \(if it was made in"
    ):
        fc.load_part(path)
    with pytest.raises(RunError, match="does not hold a part of the given model"):
        fc.load_part(
            path,
            model=replace(
                own_model(), module=nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
            ),
        )
    x = run.setup.task.source.test.x
    assert torch.equal(fc.load_part(path, model=model)(x), run.submodel(0.5)(x))
