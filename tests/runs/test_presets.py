"""Presets: each named system is a handful of fields, resolved at the door; any of them can be
overridden.
"""

import json
import shlex
import sys

import pytest

import fedcover as fc
from fedcover import cli
from fedcover.runs.experiment import read_experiment
from fedcover.runs.presets import PRESETS, SYSTEM
from fedcover.runs.sweep import expand_choices
from fedcover.runs.toml_fields import parse_change
from tests.helpers.documents import COMMANDS

SMALL = {
    "clients": 10,
    "active": 2,
    "rounds": 1,
    "epochs": 1,
    "batch_size": 64,
    "fleet": "1x1.0 + 1x0.5",
}
SMALLEST = {
    name: {
        "model": "depth_resnet(width=4, stages=2, blocks=1)"
        if "model" in preset.fields
        else "mlp(hidden=[8])"
    }
    for name, preset in PRESETS.items()
}
ON_THE_PAGE = {
    name: {"feddropout": "federated-dropout"}.get(name, name)
    for name in PRESETS
    if name not in ("fedprox", "fedavgm", "fedadam")  # these go with any policy
}
"""The preset of each system's command in docs/systems.md."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_a_round(name):
    run = fc.run(fc.Experiment(preset=name, **SMALL, **SMALLEST[name]))
    assert len(run.metrics) == 1
    assert run.gamma_min >= 0


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_its_fields(name):
    by_hand = fc.Experiment(**PRESETS[name].fields)
    by_name = fc.Experiment(preset=name)
    assert by_name.digest == by_hand.digest
    assert by_name.name == name
    assert "preset" not in by_name.to_toml()
    assert fc.Experiment.from_toml(by_name.to_toml()) == by_name
    assert fc.Experiment.from_toml(f'preset = "{name}"') == by_name


@pytest.mark.parametrize(("name", "command"), ON_THE_PAGE.items())
def test_preset_agrees_with_the_command_of_its_system(name, command):
    changes = dict(parse_change(word) for word in COMMANDS[command] if "=" in word)
    on_the_page, by_name = fc.Experiment(**changes), fc.Experiment(preset=name)
    for field in SYSTEM.keys() - {"norm"}:
        one, other = (
            str(getattr(each, field)).partition("(")[0] for each in (on_the_page, by_name)
        )
        assert one == other, field


def test_field_beside_a_preset_overrides_it():
    experiment = fc.Experiment(preset="heterofl", scaler=False, policy="rolling", name="mine")
    assert (experiment.scaler, experiment.policy, experiment.label_rows) == (False, "rolling", True)
    assert experiment.name == "mine"


def test_preset_on_the_command_line_replaces_the_files_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "depthfl"\npolicy = "random"\nscaler = true\nrounds = 7\n')
    fjord = read_experiment(path, {"preset": "fjord"})
    assert (fjord.policy, fjord.recipe, fjord.scaler) == ("prefix", "fjord(distil=1.0)", False)
    assert (fjord.model, fjord.norm, fjord.rounds, fjord.name) == ("mlp", "batch", 7, "mine")
    assert read_experiment(path, {"preset": "fjord", "scaler": True}).scaler
    assert read_experiment(path, {"lr": 0.5}).recipe == "depthfl"


def test_presets_can_be_varied():
    runs = expand_choices(fc.Experiment(rounds=3), {"preset": ["fedrolex", "fjord"]}, seeds=1)
    assert [(e.name, e.policy, e.rounds) for e in runs] == [
        ("run-preset-fedrolex-seed-0", "rolling", 3),
        ("run-preset-fjord-seed-0", "prefix", 3),
    ]


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [
        (
            "heteroflx",
            "preset must be one of heterofl, .*; got 'heteroflx' .did you mean 'heterofl'?",
        ),
        (3, "preset must be one of heterofl, .*; got 3"),
        (["heterofl"], "preset must be one of"),
    ],
)
def test_unknown_preset_is_named(preset, sentence):
    with pytest.raises(fc.InvalidValue, match=sentence):
        fc.Experiment(preset=preset)
    with pytest.raises(fc.InvalidValue, match=sentence):
        fc.Experiment.from_toml("rounds = 3", {"preset": preset})


def test_misspelt_preset_field_gets_a_hint():
    with pytest.raises(fc.InvalidValue, match="did you mean 'preset'"):
        fc.Experiment(presets="heterofl")


def command_line(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", shlex.split(text))
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert not leaving.value.code
    return capsys.readouterr().out


def test_presets_are_listed_with_what_each_sets(monkeypatch, capsys):
    listed = json.loads(command_line("fedcover list presets --json", monkeypatch, capsys))
    assert [entry["name"] for entry in listed] == list(PRESETS)
    assert listed[0]["sets"] == PRESETS["heterofl"].changed
    text = command_line("fedcover list presets", monkeypatch, capsys)
    assert "policy = rolling" in text
    assert "magnitude(scope='model')" in text


def test_preset_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sets = " ".join(
        f"--set '{key}={value}'" for key, value in (SMALL | {"model": "mlp(hidden=[8])"}).items()
    )
    command_line(f"fedcover run --set preset=fedrolex {sets} --json", monkeypatch, capsys)
    assert fc.load(tmp_path / "runs" / "fedrolex").experiment.policy == "rolling"
