"""Private runs: which are refused, what they record, and that no round is released twice."""

import contextlib
import json
import os
import sys

import pytest

import fedcover as fc
from fedcover.errors import InvalidValue, RunError
from fedcover.runs.checkpoints import list_checkpoints, load_checkpoint
from fedcover.runs.experiment import read_experiment
from fedcover.server.cohort import privacy_accountant
from fedcover.server.privacy import Gaussian
from tests.helpers.private import PRIVATE, SMALL


def test_epsilon_is_in_the_history_and_in_the_summary(tmp_path):
    pytest.importorskip("cryptography")
    run = fc.run(fc.Experiment(**PRIVATE), tmp_path / "run")
    spent = [line["epsilon"] for line in run.metrics]
    assert spent == [
        Gaussian(2.0, 1e-4).epsilon(privacy_accountant(run.setup).max_participations(round))
        for round in range(3)
    ]
    assert spent == sorted(spent)
    assert run.summary["epsilon"] == spent[-1]
    assert [line["epsilon"] for line in fc.load(tmp_path / "run").metrics] == spent


def test_private_round_is_checkpointed_every_time(tmp_path):
    """Its noise would be fresh, and the epsilon of two releases is not that of one."""
    pytest.importorskip("cryptography")
    experiment = fc.Experiment(**{**PRIVATE, "checkpoint_every": 100})
    rounds = []

    def look(report):
        rounds.append(fc.load(tmp_path / "run").state.round)

    fc.run(experiment, tmp_path / "run", watch=look)
    assert rounds == list(range(1, experiment.rounds + 1))


@pytest.fixture
def ended(tmp_path):
    """A private run that keeps the models of all its rounds."""
    pytest.importorskip("cryptography")
    fc.run(fc.Experiment(**PRIVATE, keep_rounds=(0, 1, 2, 3)), tmp_path / "run")
    return tmp_path / "run"


def checkpoints_of(folder):
    return sorted((folder / "checkpoints").iterdir())


def without(folder, *names):
    """Remove some files of a run, or all in its folders of that name."""
    for name in names:
        for path in [*(folder / name).iterdir()] if (folder / name).is_dir() else [folder / name]:
            path.unlink()


@pytest.mark.parametrize(
    ("lost", "last"),
    [
        (("checkpoints",), 3),
        (("checkpoints", "metrics.jsonl"), 3),
        (("checkpoints", "kept"), 3),
        (("checkpoints", "kept", "metrics.jsonl"), 3),
        (("checkpoints", "metrics.jsonl", "summary.json"), 3),
        (("checkpoints", "kept", "summary.json"), 3),
    ],
)
def test_private_run_without_checkpoints_is_not_resumed(ended, lost, last):
    """Its rounds would be released twice, with other noise, and counted once."""
    without(ended, *lost)
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    sentence = (
        f"run is private and has released {last} rounds, but its newest intact "
        "checkpoint is of round 0: .*new run"
    )
    with pytest.raises(RunError, match=sentence):
        fc.resume(ended)
    assert before == {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])]
)
def test_private_run_is_not_resumed_from_an_older_checkpoint(ended, harm):
    harm(checkpoints_of(ended)[-1])
    with pytest.raises(
        RunError, match="released 3 rounds, but its newest intact checkpoint is of round 2"
    ):
        fc.resume(ended)


@pytest.mark.parametrize("left", [0.0, 0.4, 0.7, 0.99])
@pytest.mark.parametrize("go_on", [fc.load, fc.resume])
def test_epsilon_counts_a_half_written_line(go_on, left, tmp_path):
    """The round's model is in its checkpoint, so it counts, also where a kill left no whole line of
    it.
    """
    pytest.importorskip("cryptography")
    ended = tmp_path / "run"
    fc.run(fc.Experiment(**{**PRIVATE, "clients": 2, "active": 2}), ended)
    spent = fc.load(ended).summary["epsilon"]
    lines = (ended / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (ended / "metrics.jsonl").write_bytes(
        b"".join(lines[:-1]) + lines[-1][: int(left * len(lines[-1]))]
    )
    assert go_on(ended).summary["epsilon"] == spent
    if go_on is fc.resume:
        assert json.loads((ended / "summary.json").read_text())["epsilon"] == spent
        assert len((ended / "metrics.jsonl").read_bytes().splitlines()) == 3


def test_private_run_with_two_models_of_a_round_is_refused(ended):
    model_file = sorted((ended / "kept").iterdir())[1]
    (ended / "kept" / f"round-000001.{'0' * 16}.safetensors").write_bytes(model_file.read_bytes())
    with pytest.raises(RunError, match="kept holds two models of round 1, and epsilon counts one"):
        fc.resume(ended)


def test_private_run_is_not_overwritten(ended):
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="holds a private run, and what it has released counts"):
        fc.run(fc.Experiment(**PRIVATE), ended, overwrite=True)
    assert before == {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}


def test_private_run_does_not_start_beside_kept_models_of_another(ended):
    without(
        ended, "checkpoints", "metrics.jsonl", "summary.json", "experiment.toml", "manifest.json"
    )
    with pytest.raises(RunError, match="kept holds models of another run"):
        fc.run(fc.Experiment(**PRIVATE), ended)


@pytest.mark.parametrize("lost", [("checkpoints", "metrics.jsonl", "summary.json")])
def test_private_run_with_kept_models_is_not_overwritten(ended, lost):
    """What was released counts."""
    without(ended, *lost)
    models = models_of(ended)
    with pytest.raises(RunError, match="holds a private run, and what it has released counts"):
        fc.run(fc.Experiment(**PRIVATE), ended, overwrite=True)
    assert models_of(ended) == models


def test_private_run_of_an_earlier_version_is_not_resumed(ended, caplog):
    fc.load(ended)
    assert not caplog.text
    manifest = json.loads((ended / "manifest.json").read_text())
    assert manifest.pop("noise") == "aes-256-ctr, a key for each round"
    (ended / "manifest.json").write_text(json.dumps(manifest))
    sentence = "private run of an earlier version: its noise can be found and taken off"
    with pytest.raises(RunError, match=sentence):
        fc.resume(ended)
    caplog.clear()
    fc.load(ended)
    assert sentence in caplog.text


FILE_OPERATIONS = 67
"""All that a whole run does to its files."""


@pytest.mark.parametrize("moment", range(FILE_OPERATIONS + 1))
def test_private_run_stopped_anywhere_releases_each_round_once(tmp_path, monkeypatch, moment):
    """Stopped at any file operation: what is on disk of a round is never run again, nor lost."""
    pytest.importorskip("cryptography")
    experiment, folder = fc.Experiment(**PRIVATE, keep_rounds=(0, 1, 2, 3)), tmp_path / "run"
    left = [moment]

    def dying(function):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:  # dead: nothing more is done to any file
                raise Killed
            return function(*args, **kwargs)

        return step

    class Killed(BaseException):
        pass

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        with contextlib.suppress(Killed):
            fc.run(experiment, folder)
    assert moment < FILE_OPERATIONS or left[0] >= 0, "the run does more to its files"
    if not (folder / "experiment.toml").exists():
        return
    before = models_of(folder)
    run = fc.resume(folder)
    assert len(checkpoints_of(folder)) == 2
    after = models_of(folder)
    assert before <= after
    assert sorted(round for round, _ in after) == [0, 1, 2, 3]
    assert [line["round"] for line in run.metrics] == [0, 1, 2]
    assert run.summary["epsilon"] == Gaussian(2.0, 1e-4).epsilon(
        privacy_accountant(run.setup).max_participations(2)
    )
    assert (3, bits_of(run.state)) in after


def models_of(folder):
    """Every model in a run folder, with its round: one model for each round, however often it is
    there.
    """
    digest = read_experiment(folder / "experiment.toml").digest
    files = [file for place in ("checkpoints", "kept") for file in list_checkpoints(folder / place)]
    return {(file.round, bits_of(load_checkpoint(file, digest, "cpu"))) for file in files}


def bits_of(state):
    return b"".join(tensor.numpy().tobytes() for tensor in state.params.values())


def test_epsilon_is_reported_only_with_privacy():
    assert "epsilon" not in fc.run(fc.Experiment(**SMALL)).summary


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"clip_updates": None},
            "clip_updates must be a length to which updates are clipped with privacy; got None",
        ),
        (
            {"rule": "median"},
            "rule must be coverage_mean without options with privacy; got 'median'",
        ),
        (
            {"rule": "coverage_mean(over=clients)"},
            "rule must be coverage_mean without options with privacy; got ",
        ),
        ({"weights": "samples"}, "weights must be uniform with privacy; got 'samples'"),
        ({"label_rows": True}, r"label_rows must be false .* with privacy; got True"),
        ({"privacy": "gaussian"}, "privacy gaussian needs the option 'noise'"),
    ],
)
def test_privacy_refuses_incompatible_fields(fields, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        fc.Experiment(**{**PRIVATE, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"privacy": "gaussian(noise=1e300)"},
            r"^privacy gaussian: noise must be in .*; got 1e\+300$",
        ),
        (
            {"privacy": "gaussian(noise=1e-300)"},
            r"^privacy gaussian: noise must be in .*; got 1e-300$",
        ),
        (
            {"privacy": "gaussian(noise=1, delta=0)"},
            r"^privacy gaussian: delta must be in .*; got 0$",
        ),
        (
            {"clip_updates": 1e-300},
            r"^clip_updates must be in \[1e-30, 1e\+30\] with privacy; got 1e-300$",
        ),
    ],
)
def test_privacy_refuses_extreme_values(fields, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        fc.Experiment(**{**PRIVATE, **fields})


@pytest.mark.parametrize("clip", [1e-30, 1e30])
def test_clip_limits_of_private_runs_are_allowed(clip):
    assert fc.Experiment(**{**PRIVATE, "clip_updates": clip}).clip_updates == clip


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"model": "wide_resnet(depth=10, widen=1)"},
            "privacy: batch norm of model .* use norm = 'group'",
        ),
        (
            {"policy": "prunefl", "recipe": "prunefl"},
            "privacy: what clients measure under recipe 'prunefl'",
        ),
        (
            {"privacy": "gaussian(noise=1.0, delta=0.5)"},
            r"privacy: delta must be below 1 / clients .* got 0\.5",
        ),
        (
            {"privacy": "fedcover.training.recipes:plain"},
            "must make a fedcover Gaussian; got Recipe",
        ),
        ({"recipe": "hermes"}, "privacy: with this recipe a client chooses what it trains"),
    ],
)
def test_privacy_refuses_parts_that_bypass_the_noise(fields, sentence, tmp_path):
    pytest.importorskip("cryptography")
    data = "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)"
    with pytest.raises(InvalidValue, match=sentence):
        fc.run(fc.Experiment(**{**PRIVATE, "dataset": data, **fields}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_private_run_with_group_norm(tmp_path):
    pytest.importorskip("cryptography")
    data = "synthetic(shape=(3, 8, 8), classes=3, samples=7, test_size=50)"
    model = {
        "dataset": data,
        "model": "wide_resnet(depth=10, widen=1)",
        "norm": "group",
        "rounds": 1,
        "active": 2,
    }
    assert fc.run(fc.Experiment(**{**PRIVATE, **model})).summary["epsilon"] > 0


def test_private_run_without_cryptography_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InvalidValue, match=r"^privacy needs cryptography; .*\[privacy\]'$"):
        fc.run(fc.Experiment(**PRIVATE))
