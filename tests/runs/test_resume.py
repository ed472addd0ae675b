"""Resumed and replayed rounds, and what must be given again."""

import json
import shutil

import pytest
import safetensors.torch
import torch

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs import checkpoints
from fedcover.runs.checkpoints import list_checkpoints
from fedcover.tensors import flatten
from tests.helpers.python_parts import half_then_whole, small_dataset
from tests.helpers.runs import RESNET, assert_equal, assert_same_end, figures, last_checkpoint, tiny


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


def test_manifest_records_resumes_on_another_machine(tmp_path):
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
    (resumption,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["resumed"]
    assert (resumption["round"], resumption["threads"]) == (1, 2)
    with pytest.raises(RunError, match="would change threads 2 to 1"):
        fc.resume(tmp_path / "run", machine=fc.Machine(threads=1))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b'{"engine": 1}', b'{"engine": "sequential"}']
)
def test_damaged_manifest_is_refused_by_name(copied, content):
    (copied / "manifest.json").write_bytes(content)
    with pytest.raises(RunError, match=r"manifest\.json"):
        fc.resume(copied)


def test_resume_refuses_zero_threads(copied):
    with pytest.raises(InvalidValue, match=r"threads must be in 1\.\.1024; got 0"):
        fc.resume(copied, machine=fc.Machine(threads=0))


def test_finished_run_is_only_summarised_again(copied):
    (copied / "summary.json").unlink()
    before = last_checkpoint(copied)
    fc.resume(copied)
    assert last_checkpoint(copied) == before
    assert json.loads((copied / "summary.json").read_text()) == fc.load(copied).summary


def test_resume_needs_python_parts_again(tmp_path):
    parts = {"dataset": small_dataset(), "policy": half_then_whole}
    whole = fc.run(tiny(keep_rounds=(1, 2)), tmp_path / "whole", **parts)

    def image(report):
        if report.round == 1:
            shutil.copytree(tmp_path / "whole2", tmp_path / "stopped")

    fc.run(tiny(), tmp_path / "whole2", watch=image, **parts)
    for act in (
        fc.resume,
        fc.load,
        lambda folder, **python_parts: fc.replay(folder, 1, **python_parts),
    ):
        with pytest.raises(RunError, match=r"its own dataset, policy: give it again"):
            act(tmp_path / "stopped")
        with pytest.raises(RunError, match=r"its own policy: give it again"):
            act(tmp_path / "stopped", dataset=parts["dataset"])
    resumed = fc.resume(tmp_path / "stopped", **parts)
    assert figures(resumed) == figures(whole)
    assert_same_end(tmp_path / "stopped", tmp_path / "whole2")
    _, report = fc.replay(tmp_path / "whole", 1, **parts)
    assert {"round": 1, **report.metrics, "seconds": None} == {**whole.metrics[1], "seconds": None}


def test_checkpoint_of_the_first_format_is_resumed(tmp_path, monkeypatch):
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
        checkpoint = next(
            file for file in list_checkpoints(tmp_path / "run" / "kept") if file.round == round + 1
        )
        stored = safetensors.torch.load_file(checkpoint.path)
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
