"""What users hold on to stays: names, signatures, options, tables, digests, keys of JSON, and bits
of runs.

The golden files in tests/golden were written by this module with FEDCOVER_WRITE_GOLDEN=1, and are
read by it otherwise. A name or key may come; none may go or change.
"""

import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.cli import app
from fedcover.registry import options_of
from tests.helpers.repository import ROOT

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("FEDCOVER_WRITE_GOLDEN") == "1"

EXPERIMENTS = {
    "defaults": {},
    "prefix": {"fleet": "4x1.0 + 6x0.5", "policy": "prefix", "rounds": 3},
    "rolling": {
        "fleet": "4x1.0 + 6x0.5",
        "policy": "rolling(spread=true)",
        "partition": "labels(limit=2)",
    },
    "magnitude": {"fleet": "4x1.0 + 6x0.5", "policy": "magnitude", "capacity": "parameters"},
    "planned": {"fleet": "4x1.0 + 6x0.75", "policy": "planned(gamma=7)", "seed": 4},
    "fjord": {
        "fleet": "5x1.0 + 5x0.25",
        "policy": "prefix",
        "recipe": "fjord",
        "model": "mlp(hidden=[64])",
    },
    "hermes": {"fleet": "5x1.0 + 5x0.5", "policy": "full", "recipe": "hermes"},
    "private": {"clip_updates": 1.0, "privacy": "gaussian(noise=4.0)", "norm": "group"},
    "characters": {
        "dataset": "characters",
        "model": "transformer",
        "policy": "random",
        "fleet": "1x0.5",
    },
    "adaptive": {
        "server": "adam",
        "schedule": "cosine",
        "rule": "coverage_mean",
        "dataset": "digits",
    },
}
"""Ten experiments whose digests are fixed."""

SMALL = {
    "dataset": "digits",
    "model": "mlp(hidden=[32, 16])",
    "clients": 12,
    "active": 4,
    "rounds": 3,
    "epochs": 1,
}
RUNS = {
    "prefix, sequential": (SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "prefix"}, "sequential"),
    "rolling, sequential": (SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "rolling"}, "sequential"),
    "random, sequential": (SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "random"}, "sequential"),
    "magnitude, sequential": (
        SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "magnitude"},
        "sequential",
    ),
    "planned copies, sequential": (
        SMALL | {"fleet": "2x0.5 + 2x0.25", "policy": "planned"},
        "sequential",
    ),
    "prunefl, sequential": (
        SMALL | {"fleet": "1x0.5", "policy": "prunefl", "recipe": "prunefl"},
        "sequential",
    ),
    "fjord, sequential": (
        SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "prefix", "recipe": "fjord"},
        "sequential",
    ),
    "hermes, sequential": (
        SMALL | {"fleet": "1x1.0", "policy": "full", "recipe": "hermes"},
        "sequential",
    ),
    "prefix, batched": (SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "prefix"}, "batched"),
    "fiarse, batched": (
        SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "magnitude", "recipe": "fiarse"},
        "batched",
    ),
}
"""Ten runs whose bits are fixed, on a computer like the one that recorded them."""


def golden(name, value):
    """The golden file of a name; written anew if that is asked for."""
    path = GOLDEN / f"{name}.json"
    if WRITE:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    return json.loads(path.read_text())


def plain(value):
    """As JSON would have it: keys are text, tuples are lists."""
    return json.loads(json.dumps(value, default=str))


def assert_holds(stored, now, where=""):
    """Everything stored is there still and the same; what came is welcome."""
    if isinstance(stored, dict):
        assert set(stored) <= set(now), f"{where}: gone: {sorted(set(stored) - set(now))}"
        for key, value in stored.items():
            assert_holds(value, now[key], f"{where}/{key}")
    else:
        assert now == stored, where


def parameters_of(function):
    """Names, kinds and defaults of what a function takes; types may be named anew."""
    return {
        name: [str(p.kind), "required" if p.default is p.empty else type(p.default).__name__]
        for name, p in inspect.signature(function).parameters.items()
    }


def test_public_names_and_signatures():
    now = {}
    for name in fc.__all__:
        value = getattr(fc, name)
        now[name] = (
            parameters_of(value)
            if callable(value) and not isinstance(value, type)
            else type(value).__name__
        )
        if isinstance(value, type):
            now[name] = {m: "member" for m in dir(value) if not m.startswith("_")}
    assert_holds(golden("names", plain(now)), plain(now))


def options_by_command(program, prefix=""):
    """Every command's options with their defaults."""
    options = {}
    for name in program:
        command = program[name]
        if name.startswith("-"):
            continue
        if command.default_command:
            arguments = command.assemble_argument_collection()
            options[f"{prefix}{name}"] = {
                " ".join(argument.names): "required"
                if argument.required
                else str(argument.field_info.default)
                for argument in arguments
            }
        options |= options_by_command(command, f"{prefix}{name} ")
    return options


def test_commands_and_their_options():
    now = options_by_command(app)
    assert_holds(golden("commands", now), now)


def test_table_names_and_their_options():
    from fedcover.cli.list_names import TABLES

    now = {
        table: {
            name: {option: str(p.default) for option, p in options_of(function).items()}
            for name, function in entries.items()
        }
        for table, entries in TABLES.items()
    }
    assert_holds(golden("tables", now), now)


def test_digests_of_experiments():
    now = {name: fc.Experiment(**fields).digest for name, fields in EXPERIMENTS.items()}
    assert_holds(golden("digests", now), now)


def test_fields_and_defaults_of_an_experiment():
    now = plain(fc.Experiment().model_dump(mode="json"))
    assert_holds(golden("fields", now), now)


def keys_of(value):
    """The shape of JSON: keys, and the kind of what is there."""
    if isinstance(value, dict):
        return {key: keys_of(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [keys_of(value[0])] if value else []
    return (
        "number"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else type(value).__name__
    )


def command_line(*words, folder):
    """A command in a process of its own: exit code, output."""
    process = subprocess.run(
        [sys.executable, "-m", "fedcover", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run made on the command line."""
    folder = tmp_path_factory.mktemp("surface")
    sets = [
        f"--set={key}={value}"
        for key, value in (SMALL | {"fleet": "2x1.0 + 2x0.5", "policy": "prefix"}).items()
    ]
    (folder / "experiment.toml").write_text("keep_rounds = [1]\n")
    code, out, err = command_line(
        "run",
        "experiment.toml",
        *sets,
        "--set=name=small",
        "--engine=sequential",
        "--json",
        folder=folder,
    )
    assert code == 0, err
    (folder / "run.json").write_text(out)
    return folder


def without_digest(path):
    """The path of a checkpoint without the digest of its bits, which differ between processors."""
    return re.sub(r"\.[0-9a-f]{16}\.safetensors$", ".DIGEST.safetensors", path)


def test_files_and_keys_of_a_run_folder(run_folder):
    runs = run_folder / "runs" / "small"
    metrics = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()]
    now = {
        "files": {
            without_digest(str(p.relative_to(runs))): "file"
            for p in sorted(runs.rglob("*"))
            if p.is_file() and p.name != ".lock"
        },
        "manifest": keys_of(json.loads((runs / "manifest.json").read_text())),
        "metrics": keys_of(metrics[-1]),
        "summary": keys_of(json.loads((runs / "summary.json").read_text())),
        "toml": {"lines": (runs / "experiment.toml").read_text()},
    }
    assert_holds(golden("run_folder", plain(now)), plain(now))


JSON_COMMANDS = {
    "run": None,
    "audit": ["audit", "--json"],
    "audit codename": ["audit", "1111223344", "--json"],
    "plan": ["plan", "--fleet", "4x1.0 + 6x0.75", "--model", "mlp", "--json"],
    "list": ["list", "policies", "--json"],
    "history": ["history", "runs", "--json"],
    "certify": ["certify", "runs/small", "--json"],
    "export": ["export", "runs/small", "--capacity", "0.5", "--json"],
    "explain": ["explain", "1111444477", "--rounds", "1", "--json"],
    "sweep": [
        "sweep",
        "experiment.toml",
        "--vary",
        "lr=0.01|0.1",
        "--set=name=tried",
        "--set=rounds=1",
        "--json",
    ],
    "reproduce": [
        "reproduce",
        "mnist-pruning",
        "--quick",
        "--only",
        "level=high",
        "--only",
        "column=iid",
        "--out",
        "quick",
        "--json",
    ],
}


@pytest.mark.system
@pytest.mark.parametrize("name", JSON_COMMANDS)
def test_keys_of_json(name, run_folder):
    words = JSON_COMMANDS[name]
    if words is None:
        text = (run_folder / "run.json").read_text()
    else:
        code, text, err = command_line(*words, folder=run_folder)
        assert code == 0, err
    now = plain({"keys": keys_of(json.loads(text))})
    assert_holds(golden(f"json_{name.replace(' ', '_')}", now), now)


EXIT_CODES = {
    "an unknown policy": (["run", "--set", "policy=nothing"], 2),
    "an unknown option": (["run", "--nothing"], 2),
    "an unknown command": (["nothing"], 2),
    "a folder that is none": (["resume", "nowhere"], 1),
    "a report about nothing": (["report", "nowhere"], 1),
    "a field out of range": (["run", "--set", "lr=-1"], 2),
    "help": (["--help"], 0),
    "version": (["--version"], 0),
}


@pytest.mark.parametrize("what", EXIT_CODES)
def test_exit_codes(what, tmp_path):
    words, code = EXIT_CODES[what]
    assert command_line(*words, folder=tmp_path)[0] == code


def processor():
    """The processor's vendor, family and model, where Linux tells them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields_of_cpu = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(fields_of_cpu.get(key, "?") for key in ("vendor_id", "cpu family", "model"))


def fingerprint():
    """What bits depend on besides the code."""
    return [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        processor(),
    ]


def bits_of(run):
    """A digest of the bits of everything that a run has made."""
    digest = hashlib.sha256()
    for name, tensor in sorted(run.state.params.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


RUN_ALL = """
import json, sys
import torch
from tests.test_surface import RUNS, bits_of
import fedcover as fc

torch.set_num_threads(1)
bits = {}
for name, (fields, engine) in RUNS.items():
    machine = fc.Machine(engine=engine, device="cpu", threads=1, processes=1)
    bits[name] = bits_of(fc.run(fc.Experiment(**fields), machine=machine))
print(json.dumps(bits))
"""


@pytest.fixture(scope="module")
def bits():
    """The bits of all runs, from one fresh process: compiled steps depend on what was compiled
    before.
    """
    root = ROOT
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL], cwd=root, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS)
def test_bits_of_runs(name, bits):
    file = f"bits_{name.replace(', ', '_').replace(' ', '_')}"
    path = GOLDEN / f"{file}.json"
    here = json.dumps(fingerprint())
    bits_by_machine = json.loads(path.read_text()) if path.exists() else {}
    bits_by_machine = golden(file, bits_by_machine | {here: bits[name]})
    if here not in bits_by_machine:
        pytest.skip(f"bits were recorded with {sorted(bits_by_machine)}, this is {here}")
    assert bits[name] == bits_by_machine[here]
