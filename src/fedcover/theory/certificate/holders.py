"""The clients that hold each entry of the model in a replayed round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.submodels import coverage
from fedcover.tensors import zeros_like
from fedcover.types import Client, Params, Reduction


@dataclass(frozen=True)
class Holders:
    """Say who holds each entry, and with which weight the server averages it.

    Attributes:
        reductions: What each client holds.
        weights: The weight of each client.
        total_weight: For each entry, the sum of the weights of its holders.
        counts: For each entry, the number of its holders.
        masks: For each client, True where it holds an entry.
        covered: True for each entry that has a holder.
    """

    reductions: tuple[Reduction, ...]
    weights: tuple[float, ...]
    total_weight: Params
    counts: Params
    masks: tuple[Mapping[str, Tensor], ...]
    covered: Mapping[str, Tensor]

    @classmethod
    def of_cohort(
        cls,
        params: Params,
        cohort: Sequence[tuple[Client, Reduction]],
        weigh: Callable[[Client], float],
    ) -> "Holders":
        """Return the holders of the entries of some parameters in a cohort."""
        reductions = tuple(reduction for _, reduction in cohort)
        weights = tuple(weigh(client) for client, _ in cohort)
        total_weight = zeros_like(params, torch.float64)
        for reduction, weight in zip(reductions, weights, strict=True):
            reduction.add_into(total_weight, None, weight)
        counts = coverage.count(params, reductions)
        covered = {name: count > 0 for name, count in counts.items()}
        masks = tuple(reduction.mask(params) for reduction in reductions)
        return cls(reductions, weights, total_weight, counts, masks, covered)

    def mean(self, vectors: Sequence[Params]) -> Params:
        """Return the weighted mean over the holders of each entry; zero without a holder."""
        sums = zeros_like(self.total_weight)
        for vector, reduction, weight in zip(vectors, self.reductions, self.weights, strict=True):
            doubles = {name: tensor.double() for name, tensor in vector.items()}
            reduction.add_into(sums, doubles, weight)
        return {
            name: torch.where(self.total_weight[name] > 0, tensor / self.total_weight[name], 0)
            for name, tensor in sums.items()
        }

    def fewest(self, where: Mapping[str, Tensor]) -> int:
        """Return the fewest holders of any entry where a mask is True."""
        return int(_smallest(self.counts, where))

    def largest_shares(self) -> tuple[float, ...]:
        """Return each client's largest share in the mean of any entry that it holds."""
        return tuple(
            weight / _smallest(self.total_weight, mask)
            for weight, mask in zip(self.weights, self.masks, strict=True)
        )

    def count_regions(self) -> int:
        """Count the different sets of clients that hold some entry.

        Each client gets a random number; sets are told apart by the sums of their numbers.
        """
        random = torch.Generator().manual_seed(0)
        numbers = torch.randint(1, 2**52, (len(self.masks),), generator=random).tolist()
        sums: set[int] = set()
        for name in self.counts:
            total = torch.zeros_like(self.covered[name], dtype=torch.int64)
            for mask, number in zip(self.masks, numbers, strict=True):
                total += mask[name].long() * number
            sums |= set(torch.unique(total).tolist())
        return len(sums - {0})


def _smallest(tensors: Params, where: Mapping[str, Tensor]) -> float:
    """Return the smallest entry where a mask is True."""
    return min(
        float(tensor[where[name]].min())
        for name, tensor in tensors.items()
        if bool(where[name].any())
    )
