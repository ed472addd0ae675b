"""The page of systems: it names all of them, and the very commands on it run and learn."""

import json
import re
import sys

import pytest

from fedcover import cli
from fedcover.models.norms import NORMS
from fedcover.server.aggregation import OVER, RULES, UNCOVERED, WEIGHTS
from fedcover.server.optimizers import SERVERS
from fedcover.training.recipes import RECIPES
from fedcover.training.recipes.label_masking import ABSENT_LABELS
from tests.helpers.documents import BLOCKS, COMMANDS, PAGE

ENOUGH = {
    "heterofl": 0.5,
    "fedrolex": 0.5,
    "fedmask": 0.6,
    "depthfl": 0.5,
    "inclusivefl": 0.5,
    "language": 0.15,
}
"""The accuracy that a command must reach; chance is 0.1. All others must reach 0.8."""


@pytest.mark.parametrize("name", COMMANDS)
def test_systems_page_command_runs_and_learns(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*COMMANDS[name], "--json"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert not leaving.value.code
    assert (tmp_path / "runs" / name / "summary.json").exists()
    accuracy = json.loads(capsys.readouterr().out)["accuracy"]
    assert accuracy >= ENOUGH.get(name, 0.8)


def test_systems_page_has_a_command_for_every_system():
    assert len(COMMANDS) == len(BLOCKS) == PAGE.count("```") // 2
    run_by_some = {word for words in COMMANDS.values() for word in words}
    for field, table in {"recipe": RECIPES, "rule": RULES, "server": SERVERS}.items():
        for name in set(table) - {"plain", "none", "coverage_mean"}:
            assert any(re.match(rf"{field}={name}\b", word) for word in run_by_some), (
                f"no command runs {field}={name}"
            )
    for policy in (
        "prefix",
        "rolling",
        "random",
        "full",
        "homogeneous",
        "exclude",
        "prunefl",
        "magnitude",
    ):
        assert any(re.match(rf"policy={policy}\b", word) for word in run_by_some), policy


def test_systems_page_lists_every_value_of_every_switch():
    rows = {row.split("|")[2]: row for row in PAGE.splitlines() if row.startswith("| ")}
    tables = {
        "over": OVER,
        "weights": WEIGHTS,
        "uncovered": UNCOVERED,
        "norm": NORMS,
        "absent_labels": ABSENT_LABELS,
        "server": SERVERS,
    }
    for field, values in tables.items():
        (row,) = [row for cell, row in rows.items() if re.search(rf"\b{field}\b", cell)]
        for value in values:
            assert f"`{value}`" in row, (field, value)
