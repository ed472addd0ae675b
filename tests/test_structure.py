"""The story is the import order: a module knows only what the reader has already met. And taste, tested."""

import ast
import re
import subprocess
import sys

import pytest

import fedcover
from fedcover.analysis.report.page import SCRIPTS
from tests.helpers.repository import ROOT

SOURCE = ROOT / "src" / "fedcover"
STORY = [
    "version", "errors", "disk", "locks", "scratch", "orphans", "stopping", "types", "slabs", "rng", "spec", "trust",
    "downloads", "user_arrays", "datasets", "partition", "sources", "fleet",
    "groups", "regions", "models", "portions", "reduction", "wire", "submodel", "hollow",
    "tracing", "norms", "coverage", "pictures",
    "objective", "planner", "design",
    "policies", "recipes", "augment", "training", "engines", "aggregation", "contracts",
    "grid_noise", "privacy", "ranks", "evaluation", "cost",
    "figures", "arrays", "replies", "theory",
    "rounds", "sharing", "presets", "experiment", "choice", "refusals", "building", "preparation", "processes",
    "summary", "plotting", "checkpoints", "manifests", "folders", "releases", "courses", "runs", "lockstep", "sweeps",
    "bench", "certificate", "reporting", "history", "tensorboard",
    "onnx_export", "export", "audit", "capacity", "planning", "paper", "flower",
    "console", "watching", "demo", "cli",
]  # fmt: skip
WALLS = {
    "policies": {"datasets", "partition", "sources", "training", "engines", "submodel"},
    "aggregation": {"models", "groups", "submodel", "reduction", "training"},
}
"""What a chapter must never import, although it stands above."""

FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]


def chapter(path):
    """The place in the story: a file, or the folder that holds it."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """The chapters that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedcover":
            rest = node.module.split(".")[1:]
            names = [rest[0]] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("fedcover.")]
        found.update(names)
    return found


def test_the_story_names_every_chapter():
    chapters = {chapter(path) for path in FILES if chapter(path) != "data"}
    assert chapters == set(STORY)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_stands_before_it(path):
    place = STORY.index(chapter(path))
    for name in imports(path):
        assert name in STORY[: place + 1], f"{path.name} imports {name}, which comes later"
        assert name not in WALLS.get(chapter(path), set()), f"{path.name} must not know {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_one_chapter_knows_flower(path):
    assert chapter(path) == "flower" or not re.search(r"^\s*(from|import) flwr", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", sorted((SOURCE / "reporting" / "assets").iterdir()), ids=lambda path: path.name)
def test_the_parts_of_the_report_page_stay_small_and_are_used(path):
    assert path.suffix == ".css" or path.read_text().count("\n") <= 350
    assert path.suffix != ".js" or path.name in SCRIPTS


def test_the_package_carries_its_types_and_its_data():
    assert (SOURCE / "py.typed").is_file()
    assert (SOURCE / "data" / "digits.npz").is_file()
    assert (SOURCE / "engines" / "products.cpp").is_file()
    assert (SOURCE / "data" / "digits.LICENSE.md").is_file()


def test_every_public_name_can_be_imported():
    for name in fedcover.__all__:
        assert getattr(fedcover, name) is not None
    assert fedcover.__all__ == sorted(fedcover.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        fedcover.nonsense  # noqa: B018


def test_running_an_experiment_needs_no_command_line_packages():
    """Only torch, numpy, pydantic and safetensors: the others may be absent."""
    program = """
import sys
for name in ("rich", "cyclopts", "pooch", "flwr", "matplotlib"):
    sys.modules[name] = None
import fedcover as fc
fields = dict(fleet="1x1.0 + 1x0.5", policy="prefix", clients=20, active=4, rounds=1, epochs=1)
print(fc.run(fc.Experiment(**fields)).gamma_min)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 0


def test_the_readme_names_commands_that_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
