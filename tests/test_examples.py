"""Every example runs as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_learns(name):
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(text.split()[0].strip(";")) for text in done.stdout.split("accuracy ")[1:]]
    assert accuracies
    assert min(accuracies) > 0.6
