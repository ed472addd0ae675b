"""The wheel: it builds, installs into an empty environment, and runs the demo from there."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

pytestmark = pytest.mark.system


def run(*command: object, cwd: Path) -> str:
    """Run a command that sees nothing of this checkout, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    result = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_wheel_contains_the_package_and_runs_the_demo(tmp_path):
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("fedcover-*.whl")
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fedcover/")}
    tracked = run("git", "ls-files", "src/fedcover", cwd=ROOT).split("\n")
    assert packaged == {name.removeprefix("src/") for name in tracked if name}

    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, "torch", cwd=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", *constraints, wheel, cwd=tmp_path)
    where = run(python, "-c", "import fedcover; print(fedcover.__file__)", cwd=tmp_path)
    assert str(environment) in where
    assert "rolling" in run(environment / "bin" / "fedcover", "demo", cwd=tmp_path)
