"""The versions of Flower that are accepted, and the one place that depends on them."""

import ast
import re
import tomllib

import pytest

import fedcover.flower as flower
from fedcover.errors import InvalidValue
from fedcover.flower.app_template import RunConfig, write_app
from tests.helpers.repository import ROOT

PRIVATE = re.compile(r"flwr\.(common|proto|supercore|superlink|supernode|server)\b")


@pytest.mark.parametrize("installed", ["1.41.0", "1.41.3", "1.42.0", "1.42.0rc1"])
def test_supported_versions_are_accepted(monkeypatch, installed):
    monkeypatch.setattr(flower, "version", lambda name: installed)
    assert flower.unsupported_version() == ""


@pytest.mark.parametrize("installed", ["1.40.2", "1.43.0", "1.43.0.dev20261101", "2.0.0", "odd"])
def test_other_versions_are_refused_with_the_range(monkeypatch, installed):
    monkeypatch.setattr(flower, "find_spec", lambda name: object())
    monkeypatch.setattr(flower, "version", lambda name: installed)
    with pytest.raises(InvalidValue) as refusal:
        flower.require_supported()
    assert f"must be >=1.41,<1.43; got {installed}: pip install" in str(refusal.value)


def test_range_is_the_same_everywhere(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flower"] == [f"flwr{flower.SUPPORTED}"]
    example = tomllib.loads((ROOT / "examples" / "flower_app" / "pyproject.toml").read_text())
    assert example["project"]["dependencies"] == [f"flwr{flower.SUPPORTED}"]
    app = write_app(tmp_path / "app", RunConfig("", "runs/x"))
    written = tomllib.loads((app / "pyproject.toml").read_text())
    assert written["project"]["dependencies"] == [f"flwr{flower.SUPPORTED}"]


def test_only_one_module_uses_private_parts_of_flower():
    users = set()
    for path in (ROOT / "src" / "fedcover").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(PRIVATE.match(name) for name in names):
                users.add(path.name)
    assert users == {"private_api.py", "supernode.py"}
