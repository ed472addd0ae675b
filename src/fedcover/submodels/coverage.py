"""How many clients train each parameter, in a round and over a window, and what a reduction cuts away.

Always counted per parameter: a weight between two channels is covered only where both channels are kept.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedcover.submodels.reductions import distinct
from fedcover.tensors import flat_copy, flatten, flatten_if_cuda, map_elementwise, zeros
from fedcover.types import Coverage, Params, Reduction


def count(params: Mapping[str, Tensor], reductions: Sequence[Reduction]) -> Params:
    """The number of reductions that hold each entry.

    >>> from fedcover.submodels.reductions import Masks
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
    return int(flatten(counts).min())


def histogram(counts: Mapping[str, Tensor]) -> dict[int, int]:
    """How many parameters are held by 0, 1, 2, ... clients.

    >>> histogram({"w": torch.tensor([2, 1]), "b": torch.tensor([2])})
    {1: 1, 2: 2}
    """
    total = torch.bincount(flatten(counts))
    return {clients: number for clients, number in enumerate(total.tolist()) if number}


def record(coverage: Coverage, counts: Params, window: int) -> Coverage:
    """The coverage after one more round of which only the last `window` are remembered one by one."""
    now = map_elementwise(lambda entries: entries > 0, counts)
    ever = (
        map_elementwise(torch.bitwise_or, flatten_if_cuda(coverage.ever), now)
        if coverage.ever
        else now
    )
    return Coverage((*coverage.window, counts)[-window:], ever)


def over_window(coverage: Coverage) -> Params:
    """How often each parameter was trained over the rounds of the window."""
    return map_elementwise(
        lambda *counts: torch.stack(counts).sum(0, dtype=torch.int32),
        *map(flatten_if_cuda, coverage.window),
    )


def energy(params: Mapping[str, Tensor]) -> float:
    """The squared length of all parameters together, summed in float64."""
    return float(_energy(params))


def delta2(params: Mapping[str, Tensor], reductions: Iterable[Reduction]) -> list[float]:
    """The share of the model's energy that each reduction cuts away: the paper's delta squared.

    >>> from fedcover.submodels.reductions import Masks
    >>> delta2({"w": torch.tensor([3.0, 4.0])}, [Masks({"w": torch.tensor([False, True])}), Masks({})])
    [0.36, 0.0]
    """
    listed = list(reductions)
    parts = [part for part, _ in distinct(listed)]
    energies = [_energy(params), *(_energy(part.extract(params)) for part in parts)]
    total, *kept = torch.stack(energies).tolist()  # asked of a GPU once
    lost = [max(0.0, (total - part) / total) if total else 0.0 for part in kept]
    by_part = dict(zip(map(id, parts), lost, strict=True))
    return [by_part[id(reduction)] for reduction in listed]


def _energy(params: Mapping[str, Tensor]) -> Tensor:
    return flat_copy(params, torch.float64).square_().sum()


def covered_only(params: Params, coverage: Coverage) -> Params:
    """The largest common model: parameters that some client has ever trained, zero elsewhere."""
    return {name: torch.where(coverage.ever[name], tensor, 0) for name, tensor in params.items()}
