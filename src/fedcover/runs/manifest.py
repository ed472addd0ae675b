"""With what a run is made: what its folder says beside the experiment."""

import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides
from fedcover.server import grid_noise
from fedcover.version import __version__


def manifest(
    experiment: Experiment, machine: Machine, parts: Overrides, data: str | Path | None
) -> dict[str, Any]:
    """With what a run is made: versions, commit, computer, and how it is computed."""
    cuda = machine.device.startswith("cuda")
    return {
        "fedcover": __version__,
        "commit": _commit(),
        "experiment": experiment.digest,
        "seed": experiment.seed,
        "data": str(Path(data).expanduser().resolve()) if data else None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(machine),
        "hardware": torch.cuda.get_device_name()
        if cuda
        else platform.processor() or platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "custom": override_names(parts),
        **({"noise": grid_noise.NOISE_SOURCE} if experiment.privacy != "none" else {}),
    }


def override_names(parts: Overrides) -> list[str]:
    """The names of what was made in Python, which a folder cannot say."""
    return [name for name in ("dataset", "model", "policy") if getattr(parts, name) is not None]


def _commit() -> str | None:
    """The commit of the source tree that fedcover runs from, if it is one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
