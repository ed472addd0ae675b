"""Checkpoints: what is saved is loaded, and damaged or foreign files are refused."""

import copy
import hashlib
import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from fedcover.errors import RunError
from fedcover.runs import checkpoints
from fedcover.runs.checkpoints import copy_to_cpu, list_checkpoints
from fedcover.server.round import run_round
from tests.helpers.worlds import same, world


def test_copy_to_cpu_reuses_unchanged_tensors():
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


def test_checkpoint_holds_the_whole_state(tmp_path):
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
            expected = getattr(whole, kind)
            assert list(getattr(there, kind)) == list(expected)
            for key, tensors in expected.items():
                same(getattr(there, kind)[key], tensors)


def test_checkpoint_before_any_round_is_loaded(tmp_path):
    _, state = world("mlp", policy="rolling")
    state = replace(
        state, params={**state.params, "a/name": torch.ones(2), "a/longer/name": torch.ones(1)}
    )
    checkpoints.save_checkpoint(tmp_path, state, "an experiment")
    again, _ = checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    same(again.params, state.params)
    assert list(again.params) == list(state.params)
    assert (again.round, again.coverage.window, again.coverage.ever) == (0, (), {})


def test_server_memory_may_share_a_tensor(tmp_path):
    setup, state = world("mlp", policy="rolling")
    twice = replace(
        setup, server=lambda tensor, memory: (tensor.new, dict.fromkeys("ab", tensor.old * 2))
    )
    after, _ = run_round(twice, state)
    checkpoints.save_checkpoint(tmp_path, after, "an experiment")
    again, _ = checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    for name in "ab":
        same(again.server[name], after.server[name])


def test_checkpoints_beyond_keep_are_removed(tmp_path):
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
def test_checkpoint_must_name_the_order_of_its_tensors(tmp_path, order):
    about = json.dumps({"experiment": "an experiment", "round": 0, "order": order})
    content = safetensors.torch.save({"params/w": torch.ones(2)}, metadata={"fedcover": about})
    path = tmp_path / f"round-000000.{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=rf"^checkpoint {path} does not say in which order its tensors are$"
    ):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")


@pytest.mark.parametrize("metadata", [None, {"made": "elsewhere"}])
def test_foreign_tensors_are_refused_as_checkpoint(tmp_path, metadata):
    content = safetensors.torch.save({"params/w": torch.ones(2)}, metadata=metadata)
    path = tmp_path / f"round-000000.{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    path.write_bytes(content)
    assert list_checkpoints(tmp_path)[0].line() is None
    with pytest.raises(RunError, match=rf"^checkpoint {path} belongs to another experiment: None$"):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")


def test_leftovers_of_writes_are_removed(tmp_path):
    other_names = [".hidden.txt", ".git.1", "a.json", "round-000001.safetensors.12", ".a.json.x"]
    for name in [
        *other_names,
        ".round-000001.0a.safetensors.12",
        ".a.json.7",
        ".a.jsonl.77",
        ".a.toml.1",
    ]:
        (tmp_path / name).touch()
    checkpoints.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(other_names)


def test_damaged_checkpoints_are_all_named(tmp_path):
    with pytest.raises(RunError, match=f"^there is no checkpoint in {tmp_path}$"):
        checkpoints.load_newest(tmp_path, "an experiment", "cpu")
    _, state = world("mlp", policy="rolling")
    for round in (3, 4):
        checkpoints.save_checkpoint(tmp_path, replace(state, round=round), "an experiment")
    with pytest.raises(
        RunError, match=r"-000004\..*: 'an experiment'; checkpoint .*-000003\..*: 'an experiment'$"
    ):
        checkpoints.load_newest(tmp_path, "another", "cpu")


def test_checkpoint_keeps_its_line_of_metrics(tmp_path):
    _, state = world("mlp", policy="rolling")
    for line in ({"round": 0, "loss": 0.5}, None):
        checkpoints.save_checkpoint(tmp_path, state, "an experiment", line=line)
        assert [file.line() for file in list_checkpoints(tmp_path)] == [line]
        list_checkpoints(tmp_path)[0].path.unlink()
    checkpoints.save_checkpoint(tmp_path, state, "an experiment", line=["no line"])
    assert [file.line() for file in list_checkpoints(tmp_path)] == [None]


def test_checkpoint_that_is_set_aside_is_not_listed(tmp_path):
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
