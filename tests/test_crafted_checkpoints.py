"""Checkpoints and models that somebody wrote by hand: one sentence, no traceback, no endless work."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import fedcover as fc
from fedcover.errors import RunError
from tests.test_runs import only_the_cpu, tiny

__all__ = ["only_the_cpu"]  # fixtures


@pytest.fixture
def folder(tmp_path):
    fc.run(tiny(rounds=2, server="momentum"), tmp_path / "run")
    return tmp_path / "run"


def crafted(folder, change):
    """Put a checkpoint in the place of the others: its digest is right, and its content what `change` makes of it."""
    path = max((folder / "checkpoints").iterdir())
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedcover"])
    values = safetensors.torch.load(content)
    values = {name: values[name] for name in about["order"]}
    change(values, about)
    about["order"] = list(values)
    content = safetensors.torch.save(values, metadata={"fedcover": json.dumps(about)})
    digest = hashlib.sha256(content).hexdigest()[:16]
    for old in (folder / "checkpoints").iterdir():
        old.unlink()
    (folder / "checkpoints" / f"round-{about['round']:06d}.{digest}.safetensors").write_bytes(content)


def name_of(values, prefix):
    return next(name for name in values if name.startswith(prefix))


def without_parameters(values, about):
    for name in [name for name in values if name.startswith("params/")]:
        del values[name]


def converted(prefix, dtype):
    def change(values, about):
        values[name_of(values, prefix)] = values[name_of(values, prefix)].to(dtype)

    return change


def put(prefix, tensor):
    def change(values, about):
        values[name_of(values, prefix)] = tensor

    return change


CHANGES = {
    "no parameters": (without_parameters, "no state of a run"),
    "counts of another size": (put("ever", torch.zeros(5, dtype=torch.bool)), "no state of a run"),
    "one count": (put("ever", torch.tensor(True)), "no state of a run"),
    "no client": (lambda values, about: values.update({"private/x/w": torch.zeros(1)}), "no state of a run"),
    "parameters of bits": (converted("params/", torch.bool), "not torch.float32"),
    "complex counts": (converted("ever", torch.complex64), "counts are not"),
    "server state of another shape": (put("server/", torch.zeros(1)), "server state 'velocity' is not"),
    "unknown measurements": (lambda values, about: values.update({"measured/a/w": torch.zeros(1)}), "'a' are not"),
    "unknown statistics": (lambda values, about: values.update({"statistics/a/w": torch.zeros(1)}), "'a' is not"),
    "too many rounds": (lambda values, about: about.update(round=10**9), "round is 1000000000, and the experiment"),
}


@pytest.mark.parametrize("go_on", [fc.load, fc.resume])
@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES.keys())
def test_a_checkpoint_that_no_run_has_written_is_refused(change, sentence, go_on, folder):
    crafted(folder, change)
    with pytest.raises(RunError, match=sentence):
        go_on(folder)


@pytest.mark.parametrize("field", ["experiment", "round"])
def test_what_a_checkpoint_says_reaches_no_terminal_as_it_is(field, folder):
    path = max((folder / "checkpoints").iterdir())
    crafted(folder, lambda values, about: about.update(experiment="\x1b[2J" * 1000) if field == "experiment" else None)
    if field == "round":
        content = next((folder / "checkpoints").iterdir()).read_bytes().replace(b'\\"round\\": 2', b'\\"round\\": []')
        content = (int.from_bytes(content[:8], "little") + 1).to_bytes(8, "little") + content[8:]
        next((folder / "checkpoints").iterdir()).unlink()
        digest = hashlib.sha256(content).hexdigest()[:16]
        path.with_name(f"round-000002.{digest}.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"checkpoint .*round") as refused:
        fc.load(folder)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_a_model_that_is_a_pipe_is_not_waited_for(tmp_path):
    """In a process of its own: who waits for a pipe there cannot be interrupted."""
    os.mkfifo(tmp_path / "part.safetensors")
    program = "import sys, fedcover; fedcover.load_part(sys.argv[1])"
    words = [sys.executable, "-c", program, str(tmp_path / "part.safetensors")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "part.safetensors cannot be read: [Errno 22] it is no regular file" in ended.stderr
