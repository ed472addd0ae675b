"""Taking a model away: a safetensors file that says how to build the module again, or an ONNX file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedcover.checkpoints import write_atomically
from fedcover.courses import shapes_of
from fedcover.errors import InvalidValue, RunError, unknown
from fedcover.experiment import Experiment
from fedcover.models import tensors
from fedcover.onnx_export import export_onnx
from fedcover.preparation import as_model, build_model, build_recipe, cuts
from fedcover.reduction import Slices
from fedcover.runs import Run
from fedcover.submodel import fill, skeleton
from fedcover.types import Model, Reduction
from fedcover.wire import decode, encode

_HEADER = {"experiment", "reduction", "shape", "classes"}


def export(run: Run, capacity: float, path: Path, format: str = "safetensors") -> dict[str, Any]:
    """Write the trained model, or the part of it that a device of some capacity holds."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    part, module = run.part(capacity), run.submodel(capacity)
    FORMATS[format](run, part, module, path)
    return {
        "path": str(path),
        "format": format,
        "capacity": capacity,
        "parameters": sum(part.sizes(run.state.params).values()),
        "stored": sum(p.numel() for p in module.parameters()),
        "shape": list(run.setup.task.source.test.x.shape[1:]),
    }


def _as_safetensors(run: Run, part: Reduction, module: nn.Module, path: Path) -> None:
    source = run.setup.task.source
    about = {
        "experiment": run.experiment.model_dump(mode="json"),
        "reduction": encode(part).hex(),
        "masked": [] if isinstance(part, Slices) else sorted(part.gradient_mask()),
        "shape": list(source.test.x.shape[1:]),
        "classes": source.classes,
        "integers": not source.test.x.is_floating_point(),
        "rounds": run.state.round,
    }
    values = {name: t.contiguous().cpu() for name, t in tensors(module).items()}
    write_atomically(path, safetensors.torch.save(values, metadata={"fedcover": json.dumps(about)}))


def _as_onnx(run: Run, part: Reduction, module: nn.Module, path: Path) -> None:
    export_onnx(module.cpu(), run.setup.task.source.test.x[:2].cpu(), path)


FORMATS: dict[str, Callable[[Run, Reduction, nn.Module, Path], None]] = {
    "safetensors": _as_safetensors,
    "onnx": _as_onnx,
}


def load_part(path: str | Path, *, model: Model | nn.Module | None = None) -> nn.Module:
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
    dtype = torch.int64 if about.get("integers") else torch.float32
    shape, classes = tuple(about["shape"]), about["classes"]
    if model is None:
        whole = build_model(experiment, shape, classes, dtype)
    else:
        whole = build_recipe(experiment).model(as_model(model, shape, classes, dtype, cut=cuts(experiment)))
    known = dict(whole.module.named_parameters())
    try:
        masked = {name: known[name] for name in about.get("masked", whole.prunable)}
        part = skeleton(whole.module, decode(bytes.fromhex(about["reduction"]), whole.groups, masked))
        fitting = shapes_of(tensors(part)) == shapes_of(values)
    except (InvalidValue, KeyError):  # a reduction of another model
        fitting = False
    if not fitting:
        wanted = "the given model" if model else f"model {experiment.model!r} (if it was made in Python, give it again)"
        raise RunError(f"{path} does not hold a part of {wanted}")
    return fill(part, values).eval()
