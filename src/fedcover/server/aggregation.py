"""Aggregation rules: how the server combines the clients' updates into one model.

A rule is a function `rule(old, updates, *, options) -> new`. `old` are the global parameters.
`updates` has one `WeightedUpdate` per client: the part of the model that it trained, its values in
the shapes of that part, and its weight. A rule knows no architecture: it sees tensors by name.

To add a rule, write such a function and add it to `RULES`. List it in `UNWEIGHTED_RULES` if it
ignores weights; add it to `RULES_AND_TWINS` in tests/server/test_aggregation.py. A rule that needs
only sums over clients should also be in `SUMMABLE_RULES`: several processes then add up sums
instead of exchanging all values. A rule outside of fedcover is used by its import path
(`rule = "my.rules:mean"`).

`UNCOVERED`, the choices for uncovered entries, holds for all rules. `WEIGHTS`, the choices for a
client's weight, is for means: `trimmed_mean` and `median` count every client the same. Clipping and
server optimisers are in modules of their own.

Suffixes of tensors: C clients, S the shape of one parameter, 1 an axis of length one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.tensors import flatten_if_cuda, map_elementwise, zeros
from fedcover.types import Client, Params, Reduction, Rule

WeightedUpdate = tuple[Reduction, Params, float]
OVER = ("coverage", "clients", "moved")
"""What the coverage mean can divide by."""


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """Sums over clients, in float64: of each entry's weighted values, and of the weights.

    `weight` counts, for each entry, only the clients that trained it; `total_weight` counts all.
    """

    total: Params
    weight: Params
    total_weight: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all sums; those of several processes add up tensor by tensor."""
        return [*self.total.values(), *self.weight.values(), self.total_weight]


@dataclass(frozen=True, slots=True)
class SummableRule:
    """A rule that needs nothing but sums over clients.

    Processes that share the clients of a round each sum their own, add up the sums, and finish.
    Any other rule needs the values of all clients in one place.
    """

    sum_updates: Callable[[Params, Iterable[WeightedUpdate]], WeightedSums]
    finish: Callable[[Params, WeightedSums], Params]

    def __call__(self, old: Params, updates: Iterable[WeightedUpdate]) -> Params:
        """Apply the rule to the updates of all clients."""
        return self.finish(old, self.sum_updates(old, updates))


# ── the coverage mean ───────────────────────────────────────────────────────────────────────────


def coverage_mean(
    old: Params, updates: Iterable[WeightedUpdate], *, over: str = "coverage"
) -> Params:
    """Average each entry over the clients that trained it; untrained entries keep their value.

    Values are summed in float64, in the given order. Values outside a client's part are never read.

    Args:
        old: the global parameters.
        updates: the clients' updates.
        over: the denominator. `coverage`: the weight of the clients that trained the entry.
            `clients`: all clients' weight, so that rarely trained entries move less (zero-padding).
            `moved`: only clients that changed the entry count for it (as in the code of FIARSE).

    Returns:
        The new global parameters.

    Raises:
        InvalidValue: `over` is none of these.
    """
    return mean_from_sums(old, weighted_sums(old, updates, over), over)


def summable_coverage_mean(*, over: str = "coverage") -> SummableRule:
    """Return the coverage mean as a sum over clients and a division."""
    return SummableRule(partial(weighted_sums, over=over), partial(mean_from_sums, over=over))


def weighted_sums(
    old: Params, updates: Iterable[WeightedUpdate], over: str = "coverage"
) -> WeightedSums:
    """Sum the clients' values and weights: the first half of `coverage_mean`."""
    if over not in OVER:
        raise unknown("rule coverage_mean: over", over, OVER)
    sums = WeightedSums(
        zeros(old, torch.float64), zeros(old, torch.float64), torch.zeros((), dtype=torch.float64)
    )
    total_weight = 0.0
    weight_by_reduction: dict[int, tuple[Reduction, float]] = {}
    for reduction, values, weight in updates:
        total_weight += weight
        if over == "moved":
            _add_moved_entries(sums, old, reduction, values, weight)
        else:
            reduction.add_into(sums.total, values, weight)
            # Clients with the same reduction add their weights in one go, below.
            _, weight_before = weight_by_reduction.get(id(reduction), (reduction, 0.0))
            weight_by_reduction[id(reduction)] = (reduction, weight_before + weight)
    for reduction, weight in weight_by_reduction.values():
        reduction.add_into(sums.weight, None, weight)
    sums.total_weight.fill_(total_weight)
    return sums


def _add_moved_entries(
    sums: WeightedSums, old: Params, reduction: Reduction, values: Params, weight: float
) -> None:
    """Add the entries that a client changed, with its weight."""
    sent = reduction.extract({name: old[name] for name in values})
    moved = {name: value != sent[name] for name, value in values.items()}
    moved_values = {name: torch.where(moved[name], value, 0) for name, value in values.items()}
    moved_counts = {name: entries.double() for name, entries in moved.items()}
    reduction.add_into(sums.total, moved_values, weight)
    reduction.add_into(sums.weight, moved_counts, weight)


def mean_from_sums(old: Params, sums: WeightedSums, over: str = "coverage") -> Params:
    """Divide the sums, and keep entries that nobody trained: the second half of `coverage_mean`."""
    total_weight = float(sums.total_weight)

    def mean_of_entries(tensor: Tensor, total: Tensor, weight: Tensor) -> Tensor:
        mean = total / weight
        if over == "clients" and total_weight:
            mean = tensor.double() + (mean - tensor.double()) * weight / total_weight
        return torch.where(weight > 0, mean, tensor.double()).to(tensor.dtype)

    return map_elementwise(mean_of_entries, flatten_if_cuda(old), sums.total, sums.weight)


# ── robust rules ────────────────────────────────────────────────────────────────────────────────


def trimmed_mean(old: Params, updates: Iterable[WeightedUpdate], *, share: float = 0.1) -> Params:
    """Average each entry without the largest and smallest `share` of its values; unweighted.

    One or two values of an entry always remain.
    """
    if not 0 <= share < 0.5:
        raise InvalidValue(f"rule trimmed_mean: share must be in [0, 0.5); got {share}")

    def mean_of_middle(values_CS: Tensor, trained_CS: Tensor) -> Tensor:
        count_S = trained_CS.sum(0)
        share_S = (count_S * share + 1e-9).floor()  # 0.1 * 10 must not fall below 1
        cut_S = torch.minimum(share_S, (count_S - 1) // 2)
        sorted_CS = _sort_trained(values_CS, trained_CS)
        rank_C = torch.arange(len(values_CS), device=values_CS.device)
        rank_C1 = rank_C.view(-1, *[1] * (values_CS.ndim - 1))
        inside_CS = (rank_C1 >= cut_S) & (rank_C1 < count_S - cut_S)
        return torch.where(inside_CS, sorted_CS, 0).sum(0) / inside_CS.sum(0)

    return reduce_stacked(mean_of_middle, old, list(updates))


def median(old: Params, updates: Iterable[WeightedUpdate]) -> Params:
    """Take each entry's median over the clients that trained it; unweighted."""

    def middle_value(values_CS: Tensor, trained_CS: Tensor) -> Tensor:
        sorted_CS = _sort_trained(values_CS, trained_CS)
        count_S = trained_CS.sum(0)
        last_rank = len(values_CS) - 1
        low_S = ((count_S - 1).clamp_min(0) // 2).clamp(max=last_rank)
        high_S = (count_S // 2).clamp(max=last_rank)
        low_value_S = sorted_CS.gather(0, low_S[None])[0]
        high_value_S = sorted_CS.gather(0, high_S[None])[0]
        return (low_value_S + high_value_S) / 2

    return reduce_stacked(middle_value, old, list(updates))


def _sort_trained(values_CS: Tensor, trained_CS: Tensor) -> Tensor:
    """Sort each entry's values over the clients, those of clients that did not train it last."""
    return torch.where(trained_CS, values_CS, torch.inf).sort(0).values


def reduce_stacked(
    reduce_one: Callable[[Tensor, Tensor], Tensor], old: Params, updates: Sequence[WeightedUpdate]
) -> Params:
    """Combine the updates one parameter at a time.

    Args:
        reduce_one: gets all clients' values of a parameter, stacked in full shape, and a mask of
            the entries that each client trained; returns the new values.
        old: the global parameters.
        updates: the clients' updates.

    Returns:
        The new global parameters; entries that nobody trained keep their value.
    """
    if not updates:
        return dict(old)
    new: Params = {}
    for name, tensor in old.items():
        values, masks = [], []
        for reduction, params, _ in updates:
            full = zeros({name: tensor}, torch.float64)
            reduction.add_into(full, {name: params[name]} if name in params else {}, 1.0)
            values.append(full[name])
            masks.append(reduction.mask({name: tensor})[name])
        trained_CS = torch.stack(masks)
        reduced = reduce_one(torch.stack(values), trained_CS)
        new[name] = torch.where(trained_CS.any(0), reduced, tensor.double()).to(tensor.dtype)
    return new


# ── the tables ──────────────────────────────────────────────────────────────────────────────────


RULES: dict[str, Rule] = {
    "coverage_mean": coverage_mean,
    "trimmed_mean": trimmed_mean,
    "median": median,
}
"""All rules, by the name that an experiment gives them."""

SUMMABLE_RULES: dict[str, Callable[..., SummableRule]] = {"coverage_mean": summable_coverage_mean}
"""Those of `RULES` that need only sums over clients, with the same options."""

UNWEIGHTED_RULES = frozenset({"trimmed_mean", "median"})
"""Those of `RULES` that count every client the same, whatever its weight."""

WEIGHTS: dict[str, Callable[[Client], float]] = {
    "uniform": lambda client: 1.0,
    "samples": lambda client: float(client.samples),
}
"""How much a client counts: all the same, as in the paper, or by its number of samples."""

UNCOVERED: dict[str, Callable[[Tensor], Tensor]] = {
    "keep": lambda tensor: tensor,
    "zero": torch.zeros_like,
}
"""What an entry becomes that nobody trained: its old value, or zero as in some public code."""
