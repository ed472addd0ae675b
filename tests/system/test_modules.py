"""The user's own modules on a federation whose machines do not have them: they travel
with the run.
"""

import os
import subprocess
import sys

from fedcover.flower.local_federation import run_local_federation
from tests.system.harness import PATIENCE

NETS = """
from torch import nn
from . import sizes

def mobile(shape, classes, generator):
    from fedcover import Model, trace
    import torch
    hidden = nn.Linear(64, sizes.HIDDEN)
    module = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(sizes.HIDDEN, classes))
    return Model(module, trace(module, torch.randn(3, *shape)))
"""
WAYS = """
import fedcover as fc
from shares import most
from fedcover.server.aggregation import coverage_mean
from fedcover.training.recipes.fedprox import plain

def window(view):
    return [fc.windows(view.groups, min(most, client.capacity)) for client in view.cohort]

def recipe():
    return plain()

def rule(old, updates):
    return coverage_mean(old, updates)
"""


def test_own_modules_travel_with_the_run(tmp_path):
    folder = tmp_path / "mine"
    (folder / "nets").mkdir(parents=True)
    (folder / "nets" / "__init__.py").write_text("from .mobile import mobile\n")
    (folder / "nets" / "mobile.py").write_text(NETS)
    (folder / "nets" / "sizes.py").write_text("HIDDEN = 24\n")
    (folder / "ways.py").write_text(WAYS)
    (folder / "shares.py").write_text("most = 0.5\n")
    own = {
        "policy": "ways:window",
        "recipe": "ways:recipe",
        "rule": "ways:rule",
        "rounds": 1,
        "name": "own",
    }
    fields = {**own, "clients": 4, "active": 4, "epochs": 1, "model": "nets:mobile"}
    (folder / "own.toml").write_text(
        "".join(f"{k} = {v!r}\n".replace("'", '"') for k, v in fields.items())
    )
    configs = [{"partition-id": place, "num-partitions": 2} for place in range(2)]
    with run_local_federation(tmp_path / "flower", configs) as federation:
        home = federation.home("admin")
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "fleet"\n[superlink.fleet]\naddress = '
            f'"{federation.address}"\ninsecure = true\n'
        )
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "fedcover",
                "flower",
                "run",
                folder / "own.toml",
                "fleet",
                "--nodes",
                "2",
            ],
            cwd=tmp_path,
            env={**os.environ, "FLWR_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        assert "nets/sizes.py" in process.stderr
        lines = (federation.folder / "runs" / "own" / "metrics.jsonl").read_text()
    assert '"dropped": []' in lines
