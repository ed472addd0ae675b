"""Count how many clients train each parameter, and measure what a reduction cuts away.

Coverage is counted per parameter: a weight between two channels is covered only where both channels
are kept.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedcover.submodels.reductions import distinct
from fedcover.tensors import flat_copy, flatten, flatten_if_cuda, map_elementwise, zeros
from fedcover.types import Coverage, Params, Reduction


def count(params: Mapping[str, Tensor], reductions: Sequence[Reduction]) -> Params:
    """Count the reductions that hold each entry.

    >>> from fedcover.submodels.reductions import Masks
    >>> first, second = torch.tensor([True, False]), torch.tensor([True, True])
    >>> count({"w": torch.zeros(2)}, [Masks({"w": first}), Masks({"w": second})])["w"].tolist()
    [2, 1]
    """
    dtype = torch.uint8 if len(reductions) < 256 else torch.int32
    counts = zeros(params, dtype)
    for reduction, occurrences in distinct(reductions):
        reduction.add_into(counts, None, occurrences)
    return counts


def minimum(counts: Mapping[str, Tensor]) -> int:
    """Return Gamma: the smallest number of clients that hold any parameter."""
    return int(flatten(counts).min())


def histogram(counts: Mapping[str, Tensor]) -> dict[int, int]:
    """Map each number of clients to the number of parameters that as many clients hold.

    >>> histogram({"w": torch.tensor([2, 1]), "b": torch.tensor([2])})
    {1: 1, 2: 2}
    """
    num_parameters = torch.bincount(flatten(counts)).tolist()
    return {clients: number for clients, number in enumerate(num_parameters) if number}


def record(coverage: Coverage, counts: Params, window: int) -> Coverage:
    """Add the counts of a round; only the counts of the last `window` rounds are kept."""
    covered_now = map_elementwise(lambda entries: entries > 0, counts)
    ever = covered_now
    if coverage.ever:
        ever = map_elementwise(torch.bitwise_or, flatten_if_cuda(coverage.ever), covered_now)
    return Coverage((*coverage.window, counts)[-window:], ever)


def over_window(coverage: Coverage) -> Params:
    """Sum the counts of each parameter over the rounds of the window."""
    return map_elementwise(
        lambda *counts: torch.stack(counts).sum(0, dtype=torch.int32),
        *map(flatten_if_cuda, coverage.window),
    )


def energy(params: Mapping[str, Tensor]) -> float:
    """Return the squared norm of all parameters, summed in float64."""
    return float(_energy(params))


def delta2(params: Mapping[str, Tensor], reductions: Iterable[Reduction]) -> list[float]:
    """Return the share of the model's energy that each reduction removes: the paper's delta^2.

    >>> from fedcover.submodels.reductions import Masks
    >>> half = Masks({"w": torch.tensor([False, True])})
    >>> delta2({"w": torch.tensor([3.0, 4.0])}, [half, Masks({})])
    [0.36, 0.0]
    """
    reductions = list(reductions)
    parts = [part for part, _ in distinct(reductions)]
    energies = [_energy(params), *(_energy(part.extract(params)) for part in parts)]
    total, *kept_energies = torch.stack(energies).tolist()  # one transfer from a GPU
    removed_share = {}
    for part, kept_energy in zip(parts, kept_energies, strict=True):
        removed_share[id(part)] = max(0.0, (total - kept_energy) / total) if total else 0.0
    return [removed_share[id(reduction)] for reduction in reductions]


def _energy(params: Mapping[str, Tensor]) -> Tensor:
    """Return the squared norm as a tensor: one sum over all entries, so one kernel on a GPU.

    `tensors.squared_norm` adds the tensors' sums one by one, and may differ in the last digit.
    """
    return flat_copy(params, torch.float64).square_().sum()


def covered_only(params: Params, coverage: Coverage) -> Params:
    """Return the largest common model: parameters that no client has trained are set to zero."""
    return {name: torch.where(coverage.ever[name], tensor, 0) for name, tensor in params.items()}
