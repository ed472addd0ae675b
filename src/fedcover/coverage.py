"""How many clients train each parameter, in a round and over a window, and what a reduction cuts away.

Always counted per parameter: a weight between two channels is covered only where both channels are kept.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcover.reduction import distinct
from fedcover.slabs import zeros
from fedcover.types import Coverage, Params, Reduction


def count(params: Mapping[str, Tensor], reductions: Sequence[Reduction]) -> Params:
    """The number of reductions that hold each entry.

    >>> from fedcover.reduction import Masks
    >>> halves = [Masks({"w": torch.tensor([True, False])}), Masks({"w": torch.tensor([True, True])})]
    >>> count({"w": torch.zeros(2)}, halves)["w"].tolist()
    [2, 1]
    """
    dtype = torch.uint8 if len(reductions) < 256 else torch.int32
    counts = zeros(params, dtype)
    for reduction, number in distinct(reductions):
        reduction.add_into(counts, None, number)
    return counts


def minimum(counts: Mapping[str, Tensor]) -> int:
    """Gamma: the fewest clients that hold any parameter."""
    return int(torch.cat([tensor.flatten() for tensor in counts.values()]).min())


def histogram(counts: Mapping[str, Tensor]) -> dict[int, int]:
    """How many parameters are held by 0, 1, 2, ... clients.

    >>> histogram({"w": torch.tensor([2, 1]), "b": torch.tensor([2])})
    {1: 1, 2: 2}
    """
    total = torch.bincount(torch.cat([tensor.flatten() for tensor in counts.values()]))
    return {clients: number for clients, number in enumerate(total.tolist()) if number}


def record(coverage: Coverage, counts: Params, window: int) -> Coverage:
    """The coverage after one more round of which only the last `window` are remembered one by one."""
    known = coverage.ever or {name: torch.zeros_like(t, dtype=torch.bool) for name, t in counts.items()}
    ever = {name: known[name] | (tensor > 0) for name, tensor in counts.items()}
    return Coverage((*coverage.window, counts)[-window:], ever)


def over_window(coverage: Coverage) -> Params:
    """How often each parameter was trained over the rounds of the window."""
    newest = coverage.window[-1]
    return {
        name: torch.stack([counts[name] for counts in coverage.window]).sum(0, dtype=torch.int32) for name in newest
    }


def energy(params: Mapping[str, Tensor]) -> float:
    """The squared length of all parameters together, summed in float64."""
    return float(torch.cat([tensor.flatten() for tensor in params.values()]).double().square().sum())


def noise(params: Mapping[str, Tensor], reduction: Reduction, total: float) -> float:
    """The share of the model's energy (its `total`) that a reduction cuts away: the paper's delta squared.

    >>> from fedcover.reduction import Masks
    >>> w = {"w": torch.tensor([3.0, 4.0])}
    >>> noise(w, Masks({"w": torch.tensor([False, True])}), energy(w))
    0.36
    """
    return max(0.0, (total - energy(reduction.extract(params))) / total) if total else 0.0


def covered_only(params: Params, coverage: Coverage) -> Params:
    """The largest common model: parameters that some client has ever trained, zero elsewhere."""
    return {name: torch.where(coverage.ever[name], tensor, 0) for name, tensor in params.items()}
