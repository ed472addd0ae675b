"""From a run folder to its certificate: the theorems' constants, both sides of every bound, and what does not apply."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedcover.errors import InvalidValue, RunError
from fedcover.host.disk import write_atomically
from fedcover.runs.checks import check_data_is_local
from fedcover.runs.run_folder import Folder
from fedcover.runs.setup import Machine, Overrides, prepare
from fedcover.theory.certificate.constants import LogFn, measure_run
from fedcover.theory.certificate.telling import certificate_to_dict
from fedcover.types import Dataset, Model, Policy


def certify(
    folder: str | Path,
    *,
    steps: int = 5,
    clients: int = 200,
    device: str = "cpu",
    data: str | Path | None = None,
    dataset: Dataset | None = None,
    model: Model | nn.Module | None = None,
    policy: Policy | None = None,
    tell: LogFn = lambda sentence: None,
    trust: bool = False,
) -> dict[str, Any]:
    """Replay the kept rounds of a run and compare its gradients with the theorems; also writes certificate.json.

    Every client's path is looked at in `steps` of its local steps, F over at most `clients` clients; all of them, and
    all rounds kept, make exact what otherwise is estimated. `trust` as in `fedcover.resume`.
    """
    for name, value in (("steps", steps), ("clients", clients)):
        if value < 1:
            raise InvalidValue(f"{name} must be at least 1; got {value}")
    parts = Overrides(dataset, model, policy)
    found = Folder(Path(folder), trust).read()
    found.check_overrides(parts)
    check_data_is_local(found.experiment)
    machine = Machine(engine="sequential", device=device).resolved()
    setup = prepare(found.experiment, machine, data=data or found.data, parts=parts)
    if setup.task.recipe.exits:
        raise RunError(
            f"{found.path} trains a model with several exits (recipe depthfl); its loss is not that of the theory"
        )
    with machine.for_setup(setup).applied():
        seen = measure_run(found, setup, steps, clients, machine.device, tell)
        made = certificate_to_dict(found.experiment.name, seen)
    write_atomically(found.path / "certificate.json", (json.dumps(made, indent=2) + "\n").encode())
    return made
