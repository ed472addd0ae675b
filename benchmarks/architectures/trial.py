"""One architecture: built, run, traced, cut to half its units, and compared with its
masked whole.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import fedcover as fc
from benchmarks.architectures.families import LARGEST, Architecture, build
from fedcover.models import params_and_buffers
from fedcover.submodels.build import load_tensors, submodel


def attempt(architecture: Architecture) -> dict[str, Any]:
    """What became of an architecture, as a row of the results."""
    start = time.monotonic()
    try:
        module, example = build(architecture)
        for mode in (True, False):
            with torch.no_grad():
                module.train(mode)(example)
    except Exception as error:
        return {"outcome": "unable", "reason": _sentence(error)}
    module.train()
    row = {"parameters": sum(weight.numel() for weight in module.parameters())}
    if row["parameters"] > LARGEST:
        return {
            **row,
            "outcome": "large",
            "reason": f"{row['parameters'] / 1e6:.0f} million parameters: not tried",
        }
    try:
        groups = fc.trace(module, example)
    except fc.InvalidValue as error:
        return {**row, "outcome": "whole", "reason": _sentence(error), "seconds": _since(start)}
    if not groups:
        return {**row, "outcome": "whole", "reason": "no group of units", "seconds": _since(start)}
    return {
        **row,
        "outcome": "cut",
        "groups": len(groups),
        **compare(module, example, groups),
        "seconds": _since(start),
    }


def compare(module: nn.Module, example: Tensor, groups: tuple[fc.UnitGroup, ...]) -> dict[str, Any]:
    """Cut half of all units; how much is left, and how far its outputs are from those of plain
    zeros in the whole.

    A layer norm takes its moments over zeros too, so there they differ; `trace` compared moments of
    what is left.
    """
    module = module.double().eval()
    half = fc.windows(groups, 0.5)
    small = submodel(module, half, {})
    values = params_and_buffers(module)
    mask = half.mask(values)
    masked = load_tensors(
        module, {name: torch.where(mask[name], value, 0) for name, value in values.items()}
    )
    inputs = example.double() if example.is_floating_point() else example
    with torch.no_grad():
        part_outputs, theirs = outputs(small.eval(), inputs), outputs(masked, inputs)
    assert [each.shape for each in part_outputs] == [each.shape for each in theirs]
    size = {
        name: sum(w.numel() for w in net.parameters())
        for name, net in (("half", small), ("whole", masked))
    }
    scale = max(1.0, *(float(each.abs().max()) for each in theirs))
    return {
        "half": round(size["half"] / size["whole"], 3),
        "difference": max(
            float((a - b).abs().max()) for a, b in zip(part_outputs, theirs, strict=True)
        )
        / scale,
    }


def outputs(module: nn.Module, example: Tensor) -> list[Tensor]:
    """All tensors of real numbers that a model gives."""
    return [
        each
        for each in tree_flatten(module(example))[0]
        if isinstance(each, Tensor) and each.is_floating_point()
    ]


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removeprefix(
        "InvalidValue: tracing: "
    )[:600]


def _since(start: float) -> float:
    return round(time.monotonic() - start, 1)
