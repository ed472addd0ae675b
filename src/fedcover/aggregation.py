"""How the server makes one model of many parts: rules over tensors that know no architecture."""

from collections.abc import Callable, Iterable

import torch

from fedcover.types import Client, Params, Reduction, Rule


def coverage_mean(old: Params, parts: Iterable[tuple[Reduction, Params, float]]) -> Params:
    """Each entry becomes the weighted mean over the clients that trained it; entries nobody trained stay.

    Summed in float64, in the order given; what stands outside a client's reduction is never read.
    """
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
    weight = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in old.items()}
    for reduction, values, scale in parts:
        reduction.add_into(total, values, scale)
        reduction.add_into(weight, None, scale)
    return {
        name: torch.where(weight[name] > 0, total[name] / weight[name], tensor.double()).to(tensor.dtype)
        for name, tensor in old.items()
    }


RULES: dict[str, Rule] = {"coverage_mean": coverage_mean}

WEIGHTS: dict[str, Callable[[Client], float]] = {
    "uniform": lambda client: 1.0,
    "samples": lambda client: float(client.samples),
}
"""How much a client counts: all the same, as in the paper, or by its number of samples."""
