"""Taking a model away: one safetensors file that holds the weights and says how to build the module again."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedcover.checkpoints import write_atomically
from fedcover.errors import RunError
from fedcover.experiment import Experiment
from fedcover.models import tensors
from fedcover.preparation import build_model
from fedcover.runs import Run
from fedcover.submodel import fill, skeleton
from fedcover.wire import decode, encode


def export(run: Run, capacity: float, path: Path) -> dict[str, Any]:
    """Write the trained model, or the part of it that a device of some capacity holds."""
    part = run.part(capacity)
    module = run.submodel(capacity)
    shape = list(run.setup.task.source.test.x.shape[1:])
    about = {
        "experiment": run.experiment.model_dump_json(),
        "capacity": str(capacity),
        "reduction": encode(part).hex(),
        "shape": json.dumps(shape),
        "classes": str(run.setup.task.source.classes),
        "rounds": str(run.state.round),
    }
    values = {name: t.contiguous().cpu() for name, t in tensors(module).items()}
    write_atomically(path, safetensors.torch.save(values, metadata=about))
    parameters = sum(p.numel() for p in module.parameters())
    kept = sum(part.sizes(run.state.params).values())
    return {"path": str(path), "capacity": capacity, "parameters": kept, "stored": parameters, "shape": shape}


def load_part(path: str | Path) -> nn.Module:
    """The exported module, ready to use; needs neither the run folder nor its data."""
    try:
        with safe_open(path, framework="pt") as opened:
            about = opened.metadata() or {}
            values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if "reduction" not in about:
        raise RunError(f"{path} is no model exported by fedcover: its header names no reduction")
    experiment = Experiment(**json.loads(about["experiment"]))
    model = build_model(experiment, tuple(json.loads(about["shape"])), int(about["classes"]))
    prunable = {name: model.module.get_parameter(name) for name in model.prunable}
    part = decode(bytes.fromhex(about["reduction"]), model.groups, prunable)
    return fill(skeleton(model.module, part), values).eval()
