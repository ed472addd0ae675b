"""Run folders and models from elsewhere: looking at them calls nothing; what they name is called
only if trusted.
"""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import fedcover as fc
from fedcover.cli.live_view import read_run_view
from fedcover.errors import RunError
from fedcover.registry import POSITIONAL_ARGUMENTS
from fedcover.runs import trust
from fedcover.runs.export import export
from tests.helpers.command_line import changed, refused
from tests.helpers.runs import tiny
from tests.helpers.saved_parts import with_header

THEIRS = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from fedcover.models import MODELS
from fedcover.policies import POLICIES
policy, mlp = POLICIES["prefix"], MODELS["mlp"]
"""
NAMED = (
    "would have 'theirs:policy' imported and called as its policy: if you "
    "trust where it comes from, say so with "
)


@pytest.fixture(autouse=True)
def nothing_was_named_yet(monkeypatch):
    """As in a process that has just begun."""
    monkeypatch.setattr(trust, "_trusted", set())


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A run folder that names a function of a neighbouring module.

    The module creates a file `imported` when it is imported.
    """
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    fc.run(tiny(policy="theirs:policy", rounds=2, keep_rounds=[0]), tmp_path / "run")
    export(fc.load(tmp_path / "run"), 0.5, tmp_path / "part.safetensors")
    forget(tmp_path, monkeypatch)
    return tmp_path / "run"


def forget(place, monkeypatch):
    """Let nothing be imported or named in this process."""
    (place / "imported").unlink(missing_ok=True)
    monkeypatch.setattr(trust, "_trusted", set())
    monkeypatch.delitem(sys.modules, "theirs", raising=False)


def was_imported(folder):
    return (folder.parent / "imported").exists()


# ── run folders ───────────────────────────────────────────────────────────────────────────────────

BUILDERS = {
    "load": fc.load,
    "resume": fc.resume,
    "replay": lambda folder, **given: fc.replay(folder, 0, **given),
    "certify": lambda folder, **given: fc.certify(folder, steps=1, **given),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_functions_named_in_a_folder_need_trust(build, theirs):
    with pytest.raises(
        RunError, match=f"^{re.escape(f'{theirs} {NAMED}')}--trust, or trust=True in Python$"
    ):
        build(theirs)
    assert not was_imported(theirs)
    build(theirs, trust=True)
    assert was_imported(theirs)


@pytest.mark.parametrize("field", POSITIONAL_ARGUMENTS)
def test_no_field_of_a_folder_calls_functions_without_trust(field, tmp_path):
    fc.run(tiny(rounds=1), tmp_path / "run")
    path = tmp_path / "run" / "experiment.toml"
    value = json.dumps(f"pty:spawn(argv=['touch', '{tmp_path}/called'])")
    path.write_text(
        re.sub(
            rf"^{field} = .*$",
            lambda line: f"{field} = {value}",
            path.read_text(),
            flags=re.MULTILINE,
        )
    )
    for build in BUILDERS.values():
        with pytest.raises(RunError, match=f"imported and called as its {field}"):
            build(tmp_path / "run")
    assert not (tmp_path / "called").exists()


def test_functions_named_by_this_process_need_no_trust(tmp_path, theirs):
    """A run that was just made, or the one that a sweep goes on with."""
    experiment = tiny(policy="theirs:policy", rounds=2)
    fc.run(experiment, tmp_path / "mine")
    assert fc.load(tmp_path / "mine").experiment == experiment
    [run] = fc.sweep([tiny(policy="theirs:policy", rounds=2, name="mine")], tmp_path)
    assert len(run.metrics) == 2


def test_sweep_does_not_import_functions_of_another_run(tmp_path, theirs):
    with pytest.raises(fc.InvalidValue, match="run holds another experiment"):
        list(fc.sweep([tiny(rounds=2, name="run")], tmp_path))
    assert not was_imported(theirs)


def test_trust_covers_a_function_with_its_options(tmp_path, theirs):
    trust.trust_fields({"policy": "theirs:policy(spread=true)"})
    with pytest.raises(RunError, match="'theirs:policy' imported"):
        fc.load(theirs)


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "words",
    [
        ("resume",),
        ("export",),
        ("certify",),
        ("plan", "--fleet", "1x1.0", "--dataset", "digits", "--weights"),
    ],
)
def test_commands_that_build_the_model_need_the_trust_flag(words, theirs, fedcover):
    refused(fedcover(*words, theirs), 1, NAMED + "--trust")
    assert not was_imported(theirs)


def test_commands_run_with_the_trust_flag(theirs, fedcover):
    code, _, err = fedcover("export", theirs, "--trust")
    assert code == 0, err
    assert fedcover("resume", theirs, "--trust")[0] == 0


@pytest.mark.parametrize(
    "words", [("watch", "--once"), ("watch", "--json"), ("report",), ("history", "--csv")]
)
def test_viewing_a_folder_imports_nothing(words, theirs, fedcover, monkeypatch):
    monkeypatch.chdir(theirs.parent)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(theirs.parent))]
    )
    code, _, err = fedcover(*words, theirs)
    assert code == 0, err
    assert not was_imported(theirs)
    assert (
        "" not in sys.path
    )  # else whatever is imported later may come from the folder that is looked at


def test_resume_hint_of_a_foreign_folder_has_no_trust_flag(theirs):
    """Who copies what is shown must not be led to call it."""
    (theirs / "summary.json").unlink()
    assert "--trust" not in read_run_view(theirs).resume_hint
    tiny(policy="theirs:policy")
    assert read_run_view(theirs).resume_hint == f"'fedcover resume {theirs} --trust'"


def test_stopped_resume_names_the_trust_flag(theirs, fedcover, monkeypatch, tmp_path):
    def stop(*args, **arguments):
        raise KeyboardInterrupt

    fedcover("run", *changed(policy="theirs:policy", name="stopped", rounds=1))
    monkeypatch.setattr("fedcover.cli.run.resume_run", stop)
    code, _, err = fedcover("resume", "runs/stopped")
    assert (code, err) == (130, "stopped; resume with: fedcover resume runs/stopped --trust\n")


def answered(words, answer, folder):
    """A command on a terminal whose user gives one answer: its exit code and all that was shown."""
    terminal_end, ends = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcover", *words], stdin=ends, stdout=ends, stderr=ends, cwd=folder
    )
    os.close(ends)
    os.write(terminal_end, f"{answer}\n".encode())
    output = b""
    while True:
        try:
            output += os.read(terminal_end, 65536)
        except OSError:  # the terminal is gone
            break
    os.close(terminal_end)
    return process.wait(60), " ".join(output.decode().split())


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1)])
def test_terminal_user_is_asked_for_trust(answer, code, theirs):
    left, output = answered(["export", "run"], answer, theirs.parent)
    assert "run wants to import and call: 'theirs:policy'" in output
    assert "do you trust the source of this folder? [y/N]" in output
    assert left == code, output
    assert was_imported(theirs) == (code == 0)


# ── exported models ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def part(tmp_path):
    run = fc.run(tiny(rounds=1))
    export(run, 0.5, tmp_path / "part.safetensors")
    return tmp_path / "part.safetensors"


def test_exported_model_cannot_name_its_builder(part, tmp_path):
    with_header(part, model="pty:spawn", shape=["sh", "-c", f"touch {tmp_path}/called"])
    with pytest.raises(RunError):
        fc.load_part(part)
    with_header(part, shape=[64])
    with pytest.raises(
        RunError,
        match="would have 'pty:spawn' called as its model, which a file may not say: build",
    ):
        fc.load_part(part)
    assert not (tmp_path / "called").exists()


def test_exported_model_cannot_name_its_recipe(part):
    with_header(part, recipe="theirs:recipe")
    with pytest.raises(
        RunError, match=r"would have 'theirs:recipe' called as its recipe.*model=\.\.\.\)$"
    ):
        fc.load_part(part)


@pytest.mark.parametrize("field", sorted(POSITIONAL_ARGUMENTS.keys() - {"model", "recipe"}))
def test_load_part_ignores_fields_that_it_does_not_need(field, part):
    """A device that runs the model needs no policy; so it is not asked for a module that it has
    not.
    """
    expected = fc.load_part(part)
    again = fc.load_part(with_header(part, **{field: "theirs:function"}))
    assert torch.equal(again(torch.ones(1, 64)), expected(torch.ones(1, 64)))


def test_given_module_replaces_the_named_builder(theirs):
    path = with_header(
        theirs.parent / "part.safetensors", model="theirs:build", recipe="theirs:recipe"
    )
    module = fc.run(tiny(rounds=1)).model()
    assert isinstance(fc.load_part(path, model=module), torch.nn.Module)
    assert not was_imported(theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "abc"},
        {"shape": [-1]},
        {"shape": [2**70]},
        {"shape": [1] * 50},
        {"shape": None},
        {"classes": 0},
        {"classes": "ten"},
        {"reduction": "zz"},
        {"reduction": 3},
        {"masked": "x"},
        {"masked": [1]},
        {"model": 5},
        {"model": "mlp(hidden='x')"},
        {"norm": ["batch"]},
        {"recipe": None},
        {"seed": -1},
        {"integers": "maybe"},
    ],
    ids=str,
)
def test_odd_export_header_is_one_sentence(changes, part):
    with pytest.raises(RunError, match=rf"^{re.escape(str(part))} "):
        fc.load_part(with_header(part, **changes))


def test_export_header_that_is_no_table_is_refused(part):
    values = safetensors.torch.load_file(part)
    for text in ("[]", "3", '"experiment"', "[" * 100_000, "{"):
        part.write_bytes(safetensors.torch.save(values, metadata={"fedcover": text}))
        with pytest.raises(RunError, match=f"^{re.escape(str(part))} "):
            fc.load_part(part)
