"""The manifest of a run: the versions and the machine that it was run with."""

import json
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcover.errors import RunError
from fedcover.host import disk
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides
from fedcover.server import grid_noise
from fedcover.version import __version__

_MUST_MATCH = {
    "engine": str,
    "device": str,
    "threads": int,
    "deterministic": bool,
    "precision": str,
    "torch": str,
}
"""What changes the result in the last digits, and so must stay the same on resume."""


def build_manifest(
    experiment: Experiment, machine: Machine, overrides: Overrides, data: str | Path | None
) -> dict[str, Any]:
    """Return the manifest of a new run: versions, commit, hardware and machine settings."""
    if machine.device.startswith("cuda"):
        hardware = torch.cuda.get_device_name()
    else:
        hardware = platform.processor() or platform.machine()
    fields = {
        "fedcover": __version__,
        "commit": _commit(),
        "experiment": experiment.digest,
        "seed": experiment.seed,
        "data": str(Path(data).expanduser().resolve()) if data else None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(machine),
        "hardware": hardware,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "custom": override_names(overrides),
    }
    if experiment.privacy != "none":
        fields["noise"] = grid_noise.NOISE_SOURCE
    return fields


def override_names(overrides: Overrides) -> list[str]:
    """Return which objects were made in Python; a folder cannot describe those."""
    names = ("dataset", "model", "policy")
    return [name for name in names if getattr(overrides, name) is not None]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run and check that it names the machine."""
    try:
        fields: dict[str, Any] = json.loads(disk.read_bytes(path))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}") from error
    for key, kind in _MUST_MATCH.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(key), kind):
            raise RunError(f"{path} is not a manifest of a run: it does not say its {key}")
    return fields


def machine_fields(machine: Machine) -> dict[str, Any]:
    """Return the fields of a manifest that say how a run is computed here."""
    return {**asdict(machine), "torch": torch.__version__}


def machine_to_resume(fields: dict[str, Any], requested: Machine | None) -> Machine:
    """Return the machine to resume a run on: the last one, changed only where requested."""
    last = Machine(**{key: fields[key] for key in _MUST_MATCH if key != "torch"})
    processes: int | str = fields.get("processes", 1)
    if requested is None:
        requested = Machine()
    elif requested.processes != "auto":
        # sums over processes differ in the last digit at most, so their number may change
        processes = requested.processes
    return Machine(
        engine=last.engine if requested.engine == "auto" else requested.engine,
        device=last.device if requested.device == "auto" else requested.device,
        threads=last.threads if requested.threads is None else requested.threads,
        deterministic=requested.deterministic or last.deterministic,
        precision=last.precision if requested.precision == "fp32" else requested.precision,
        processes=processes,
    ).resolved()


def describe_changes(fields: dict[str, Any], machine: Machine) -> list[str]:
    """Describe each setting that differs from the manifest and may change the result."""
    current = machine_fields(machine)
    return [
        f"{key} {fields[key]} to {current[key]}"
        for key in _MUST_MATCH
        if fields[key] != current[key]
    ]


def _commit() -> str | None:
    """Return the commit of the source tree that fedcover runs from, if there is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    here = Path(__file__).parent
    try:
        finished = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
