"""Measure what a policy covers over some rounds of the same weights and clients."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fedcover.policies.planner.plan_metrics import count_and_energy, energy_on_cut_axes
from fedcover.submodels import coverage
from fedcover.submodels.reductions import Slices
from fedcover.types import Params, PolicyFunction, Reduction, View


@dataclass(frozen=True)
class PolicyCoverage:
    """The coverage of a policy over some rounds, and its mean noise.

    Coverage is the fewest clients per parameter: in any round, and over all of them.
    """

    gamma: int
    gamma_window: int
    noise: float

    def line(self) -> dict[str, Any]:
        """Return a row of the report."""
        return asdict(self)


def reductions_by_round(
    policy: PolicyFunction, view: View, rounds: int
) -> Iterator[list[Reduction]]:
    """Yield the reductions of each round, with the same weights and clients in all of them."""
    for round in range(rounds):
        reductions = policy(replace(view, round=round))
        yield [reduction for reduction in reductions if reduction is not None]


def count_and_noise(view: View, parts: Sequence[Reduction]) -> tuple[Params, list[float]]:
    """Return how many parts hold each parameter, and the share of energy that each part lacks."""
    slices = [part for part in parts if isinstance(part, Slices)]
    if len(slices) < len(parts):
        return coverage.count(view.params, parts), coverage.delta2(view.params, parts)
    squares = energy_on_cut_axes(view.groups, view.params)
    counts, energy_N = count_and_energy(view.groups, squares, slices)
    total = coverage.energy(view.params)
    return counts, [_lost_share(float(energy), total) for energy in energy_N]


def _lost_share(energy: float, total: float) -> float:
    """Return the share that is cut, with rounding errors set to zero."""
    share = 1 - energy / total if total else 0.0
    return share if share > 1e-9 else 0.0


def measure_policy(policy: PolicyFunction, view: View, rounds: int) -> PolicyCoverage:
    """Measure the coverage and the noise of a policy over some rounds."""
    gammas, noises = [], []
    total_counts: Params = {}
    for reductions in reductions_by_round(policy, view, rounds):
        counts, lost_shares = count_and_noise(view, reductions)
        for name, count in counts.items():
            total_counts[name] = count.int() + total_counts.get(name, 0)
        gammas.append(coverage.minimum(counts))
        noises.append(sum(lost_shares))
    return PolicyCoverage(min(gammas), coverage.minimum(total_counts), fmean(noises))


def rounds_to_cover(policy: PolicyFunction, view: View, rounds: int, clients: int) -> int | None:
    """Return after how many rounds `clients` different clients have trained each parameter.

    None means that it takes more than `rounds`.
    """
    smaller_params = _without_uncut_entries(view)
    trained_by_client: list[dict[str, Tensor]] = []
    for rounds_done, reductions in enumerate(reductions_by_round(policy, view, rounds), start=1):
        all_slices = all(isinstance(reduction, Slices) for reduction in reductions)
        params = smaller_params if all_slices else view.params
        masks = [reduction.mask(params) for reduction in reductions]
        trained_by_client = _union(trained_by_client, masks) if trained_by_client else masks
        if _fewest_clients(trained_by_client, params) >= clients:
            return rounds_done
    return None


def _without_uncut_entries(view: View) -> Params:
    """Return one entry along each axis that no group cuts: slices treat all of them alike."""
    energies = energy_on_cut_axes(view.groups, view.params)
    return {
        name: tensor[tuple(slice(0, size) for size in energies[name].shape)]
        for name, tensor in view.params.items()
    }


def _union(
    earlier: Sequence[dict[str, Tensor]], masks: Sequence[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    return [
        {name: earlier_mask[name] | mask[name] for name in mask}
        for earlier_mask, mask in zip(earlier, masks, strict=True)
    ]


def _fewest_clients(masks: Sequence[dict[str, Tensor]], params: Params) -> int:
    """Return the fewest clients whose masks contain any single parameter."""
    counts = [torch.stack([mask[name] for mask in masks]).sum(0) for name in params]
    return min(int(count.min()) for count in counts)
