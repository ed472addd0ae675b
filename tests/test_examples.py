"""Every example runs as its first lines say."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.repository import ROOT

EXAMPLES = sorted(
    path.stem for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py"
)


LONG = (
    "certificate",
    "lora_gap",
    "your_data",
    "your_model",
    "your_policy",
    "your_recipe",
    "your_rows",
)
"""Examples that take long; they are run with the system tests."""


FLOWER = ("your_rows",)
"""Examples that start Flower's programs, which warn."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.system] if name in LONG else []) for name in EXAMPLES],
)
def test_example_runs_and_learns(name):
    process = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONWARNINGS": "default" if name in FLOWER else "error",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    accuracies = [
        float(text.split()[0].strip(";")) for text in process.stdout.split("accuracy ")[1:]
    ]
    assert accuracies
    assert min(accuracies) > 0.6


def test_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # outputs would grow old
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["run"].accuracy > 0.8
    assert names["run"].gamma_min > 0
    assert names["page"].stat().st_size > 50_000
    assert sum(p.numel() for p in names["small"].parameters()) < 0.26 * 4810
