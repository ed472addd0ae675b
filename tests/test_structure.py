"""The order of the packages is the order of imports; and taste, tested."""

import ast
import re
import subprocess
import sys

import pytest

import fedcover
from fedcover.analysis.report.page import SCRIPTS
from tests.helpers.repository import ROOT

SOURCE = ROOT / "src" / "fedcover"
FOUNDATION = ["version", "errors", "types", "tensors", "rng", "registry", "fleet", "log"]
PACKAGES = [
    "host",
    "data",
    "models",
    "submodels",
    "policies",
    "training",
    "server",
    "runs",
    "theory",
    "analysis",
    "paper",
    "flower",
    "cli",
]
"""A package imports only from the foundation, from itself and from packages before it."""

ORDER = [*FOUNDATION, *PACKAGES]
WALLS = {
    "policies": {"data", "submodels.build"},
    "server/aggregation": {"models", "submodels"},
}
"""What must not be imported, although it comes before."""

FILES = [
    path for path in sorted(SOURCE.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")
]


def package(path):
    """The package that a file is in, or its own name if it belongs to the foundation."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """The modules and packages of fedcover that a file imports, without the package's own name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "fedcover"
        ):
            names |= {
                f"{node.module}.{alias.name}".removeprefix("fedcover.") for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {
                a.name.removeprefix("fedcover.")
                for a in node.names
                if a.name.startswith("fedcover.")
            }
    return names


def test_every_module_is_in_a_package_or_belongs_to_the_foundation():
    assert {package(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_package_imports_only_what_comes_before_it(path):
    place = ORDER.index(package(path))
    for name in imports(path):
        assert name.split(".")[0] in ORDER[: place + 1], (
            f"{path.name} imports {name}, which comes later"
        )


@pytest.mark.parametrize("place", WALLS)
def test_package_imports_respect_the_walls(place):
    for path in FILES:
        if str(path.relative_to(SOURCE)).startswith(place):
            for name in imports(path):
                assert not any(name.startswith(wall) for wall in WALLS[place]), (
                    f"{path.name} imports {name}"
                )


def test_no_test_module_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = [
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests")
            for alias in node.names
        ]
        found = [name for name in imported if re.search(r"[.]test_", name)]
        assert found == [], f"{path.name} imports {found}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_flower_is_imported_by_its_package_only(path):
    assert package(path) == "flower" or not re.search(
        r"^\s*(from|import) flwr", path.read_text(), re.MULTILINE
    )


def test_only_one_module_imports_the_trees_of_torch_whose_module_is_private():
    importers = [path.name for path in FILES if "torch.utils._pytree" in path.read_text()]
    assert importers == ["tensors.py"]


LONG_FILES = {"experiment.py": 350, "strategy.py": 355}
"""Every field of an experiment with its documentation; every method that Flower calls."""
LONG_FUNCTIONS = {"cnn": 61, "plan_report": 63}
"""Half of each is its documented signature; the rest fills one list or one dictionary."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= LONG_FILES.get(path.name, 335)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno
            assert lines <= LONG_FUNCTIONS.get(node.name, 60), f"{node.name} is too long"


ASSETS = sorted((SOURCE / "analysis" / "report" / "assets").iterdir())


@pytest.mark.parametrize("path", ASSETS, ids=lambda path: path.name)
def test_report_assets_stay_small_and_are_used(path):
    assert path.suffix == ".css" or path.read_text().count("\n") <= 350
    assert path.suffix != ".js" or path.name in SCRIPTS


def test_package_contains_types_and_data():
    assert (SOURCE / "py.typed").is_file()
    assert (SOURCE / "data" / "digits.npz").is_file()
    assert (SOURCE / "training" / "engines" / "cpu_kernels.cpp").is_file()
    assert (SOURCE / "data" / "digits.LICENSE.md").is_file()


def test_every_public_name_can_be_imported():
    for name in fedcover.__all__:
        assert getattr(fedcover, name) is not None
    assert fedcover.__all__ == sorted(fedcover.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        fedcover.nonsense  # noqa: B018


def test_run_needs_no_command_line_packages():
    """Only torch, numpy, pydantic, safetensors and tomli_w: the others may be absent."""
    program = """
import sys
for name in ("rich", "cyclopts", "pooch", "flwr", "matplotlib"):
    sys.modules[name] = None
import fedcover as fc
fields = dict(fleet="1x1.0 + 1x0.5", policy="prefix", clients=20, active=4, rounds=1, epochs=1)
print(fc.run(fc.Experiment(**fields)).gamma_min)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 0


def test_readme_names_commands_that_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
