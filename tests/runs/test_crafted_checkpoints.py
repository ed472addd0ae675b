"""Checkpoints and models that somebody wrote by hand: one sentence, no traceback, no
endless work.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fedcover as fc
from fedcover.errors import RunError
from fedcover.runs.export import export
from tests.helpers.runs import tiny
from tests.helpers.saved_parts import with_header

DRAW = (b"D" + struct.pack("<dQ", 0.5, 1)).hex()
WINDOW = (b"W" + struct.pack("<II", 0, 3_000_000_000)).hex()
LIMITED = """
import json, os, resource, sys
import fedcover
from fedcover.models import meta_device
from fedcover.runs import export
from fedcover.submodels import build
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**31,) * 2)
        try:
            error = fedcover.load_part(path)
        except BaseException as raised:
            error = raised
        rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
        print(json.dumps([path, type(error).__name__, rise]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Load each file in a process that may have 2 GiB more than it has before; print the error and the
rise in KiB.
"""


@pytest.fixture
def folder(tmp_path):
    fc.run(tiny(rounds=2, server="momentum"), tmp_path / "run")
    return tmp_path / "run"


def crafted(folder, change):
    """Put a checkpoint in the place of the others: its digest is right, and its content what
    `change` makes of it.
    """
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
    (folder / "checkpoints" / f"round-{about['round']:06d}.{digest}.safetensors").write_bytes(
        content
    )


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
    "no parameters": (without_parameters, "not a state of a run"),
    "counts of another size": (
        put("ever", torch.zeros(5, dtype=torch.bool)),
        "not a state of a run",
    ),
    "one count": (put("ever", torch.tensor(True)), "not a state of a run"),
    "no client": (
        lambda values, about: values.update({"private/x/w": torch.zeros(1)}),
        "not a state of a run",
    ),
    "parameters of bits": (converted("params/", torch.bool), "not torch.float32"),
    "complex counts": (converted("ever", torch.complex64), "counts are not"),
    "server state of another shape": (
        put("server/", torch.zeros(1)),
        "server state 'velocity' is not",
    ),
    "unknown measurements": (
        lambda values, about: values.update({"measured/a/w": torch.zeros(1)}),
        "'a' are not",
    ),
    "unknown statistics": (
        lambda values, about: values.update({"statistics/a/w": torch.zeros(1)}),
        "'a' is not",
    ),
    "too many rounds": (
        lambda values, about: about.update(round=10**9),
        "round is 1000000000, and the experiment",
    ),
}


@pytest.mark.parametrize("go_on", [fc.load, fc.resume])
@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES.keys())
def test_crafted_checkpoint_is_refused(change, sentence, go_on, folder):
    crafted(folder, change)
    with pytest.raises(RunError, match=sentence):
        go_on(folder)


@pytest.mark.parametrize("field", ["experiment", "round"])
def test_text_of_a_checkpoint_is_escaped_in_errors(field, folder):
    path = max((folder / "checkpoints").iterdir())
    crafted(
        folder,
        lambda values, about: (
            about.update(experiment="\x1b[2J" * 1000) if field == "experiment" else None
        ),
    )
    if field == "round":
        content = (
            next((folder / "checkpoints").iterdir())
            .read_bytes()
            .replace(b'\\"round\\": 2', b'\\"round\\": []')
        )
        content = (int.from_bytes(content[:8], "little") + 1).to_bytes(8, "little") + content[8:]
        next((folder / "checkpoints").iterdir()).unlink()
        digest = hashlib.sha256(content).hexdigest()[:16]
        path.with_name(f"round-000002.{digest}.safetensors").write_bytes(content)
    with pytest.raises(RunError, match=r"checkpoint .*round") as refused:
        fc.load(folder)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_load_part_does_not_wait_for_a_pipe(tmp_path):
    """In a process of its own: who waits for a pipe there cannot be interrupted."""
    os.mkfifo(tmp_path / "part.safetensors")
    program = "import sys, fedcover; fedcover.load_part(sys.argv[1])"
    words = [sys.executable, "-c", program, str(tmp_path / "part.safetensors")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "part.safetensors cannot be read: [Errno 22] it is not a regular file" in ended.stderr


@pytest.fixture
def part(tmp_path):
    run = fc.run(tiny(rounds=1))
    export(run, 0.5, tmp_path / "part.safetensors")
    return tmp_path / "part.safetensors"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.complex64, torch.float16, torch.float64], ids=str
)
def test_load_part_refuses_another_dtype(dtype, part):
    content = part.read_bytes()
    about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    values = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load(content).items()}
    part.write_bytes(safetensors.torch.save(values, metadata=about))
    with pytest.raises(RunError, match="does not hold a part of model"):
        fc.load_part(part)


HUGE = {
    "wide mlp": ("mlp(hidden=[30000,30000])", ""),
    "widest mlp": ("mlp(hidden=[4000000000])", ""),
    "drawn units": ("mlp(hidden=[3000000000])", DRAW),
    "a window of units": ("mlp(hidden=[3000000000])", WINDOW),
    "deep resnet": ("wide_resnet(depth=1000000000,widen=1)", ""),
    "lstm": ("lstm(hidden=100000)", ""),
    "deep transformer": ("transformer(blocks=1000000000)", ""),
    "transformer without heads": ("transformer(heads=0)", ""),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What loading each file that names a huge model ended with: the error and the memory
    in KiB.
    """
    folder = tmp_path_factory.mktemp("huge")
    export(fc.run(tiny(rounds=1)), 0.5, folder / "part.safetensors")
    paths = {name: folder / f"{name}.safetensors" for name in HUGE}
    for name, (model, units) in HUGE.items():
        shutil.copy(folder / "part.safetensors", paths[name])
        with_header(paths[name], model=model, **({"reduction": units} if units else {}))
        if not model.startswith(("mlp", "wide")):
            with_header(paths[name], shape=[64], integers=True)
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths.values()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {Path(path).stem: (error, rise) for path, error, rise in lines}


@pytest.mark.parametrize("name", HUGE)
def test_load_part_of_a_huge_model_takes_no_memory(name, loaded):
    """In a process that may have 2 GiB more than it has before it reads the file."""
    error, rise = loaded[name]
    assert error == "RunError"
    assert rise < 256 * 2**10
