"""Taking a model away: one safetensors file that holds the weights and says how to build the module again."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedcover.checkpoints import write_atomically
from fedcover.errors import InvalidValue, RunError
from fedcover.experiment import Experiment
from fedcover.models import tensors
from fedcover.preparation import build_model
from fedcover.runs import Run
from fedcover.submodel import fill, skeleton
from fedcover.types import Model, Params
from fedcover.wire import decode, encode

_HEADER = {"experiment", "reduction", "shape", "classes"}


def export(run: Run, capacity: float, path: Path) -> dict[str, Any]:
    """Write the trained model, or the part of it that a device of some capacity holds."""
    part = run.part(capacity)
    module = run.submodel(capacity)
    shape = list(run.setup.task.source.test.x.shape[1:])
    about = {
        "experiment": run.experiment.model_dump(mode="json"),
        "capacity": capacity,
        "reduction": encode(part).hex(),
        "shape": shape,
        "classes": run.setup.task.source.classes,
        "rounds": run.state.round,
    }
    values = {name: t.contiguous().cpu() for name, t in tensors(module).items()}
    write_atomically(path, safetensors.torch.save(values, metadata={"fedcover": json.dumps(about)}))
    parameters = sum(p.numel() for p in module.parameters())
    kept = sum(part.sizes(run.state.params).values())
    return {"path": str(path), "capacity": capacity, "parameters": kept, "stored": parameters, "shape": shape}


def load_part(path: str | Path, *, model: Model | None = None) -> nn.Module:
    """The exported module, ready to use; needs neither the run folder nor its data.

    `model` is needed only if the run's model was made in Python.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get("fedcover", "{}"))
            values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    missing = _HEADER - about.keys()
    if missing:
        raise RunError(f"{path} is no model exported by fedcover: its header lacks {min(missing)!r}")
    experiment = Experiment(**about["experiment"])
    whole = model or build_model(experiment, tuple(about["shape"]), about["classes"])
    prunable = {name: whole.module.get_parameter(name) for name in whole.prunable}
    try:
        part = skeleton(whole.module, decode(bytes.fromhex(about["reduction"]), whole.groups, prunable))
        fitting = _shapes(tensors(part)) == _shapes(values)
    except InvalidValue:  # a reduction of another model
        fitting = False
    if not fitting:
        wanted = "the given model" if model else f"model {experiment.model!r} (if it was made in Python, give it again)"
        raise RunError(f"{path} does not hold a part of {wanted}")
    return fill(part, values).eval()


def _shapes(values: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in values.items()}
