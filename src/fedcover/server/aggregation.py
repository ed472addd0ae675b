"""How the server makes one model of many parts: rules over tensors that know no architecture.

A rule sees, for every client, what it trained (a reduction), the values, and a weight. Apart from the rule: how long an
update may be, how much a client counts, what becomes of entries that nobody trained, and the server's own optimiser.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.tensors import flatten_if_cuda, map_elementwise, zeros
from fedcover.types import Client, Params, Reduction, Rule

WeightedUpdate = tuple[Reduction, Params, float]
OVER = ("coverage", "clients", "moved")
"""What the coverage mean divides by."""


@dataclass(frozen=True, slots=True)
class WeightedSums:
    """What a mean is made of: every entry's weighted sum and weight, in float64, and the weight of all clients."""

    total: Params
    weight: Params
    total_weight: Tensor


def coverage_mean(
    old: Params, parts: Iterable[WeightedUpdate], *, over: str = "coverage"
) -> Params:
    """Each entry becomes the weighted mean over the clients that trained it; entries nobody trained stay.

    Summed in float64, in the order given; what stands outside a client's reduction is never read. With `over="clients"`
    the sum of changes is divided by all clients' weight, so that seldom trained entries move less (zero-padding); with
    `over="moved"` only clients that changed an entry count for it (the code of FIARSE).
    """
    return mean_from_sums(old, weighted_sums(old, parts, over), over)


def weighted_sums(
    old: Params, parts: Iterable[WeightedUpdate], over: str = "coverage"
) -> WeightedSums:
    """The sums of which `coverage_mean` is made; those of several processes add up."""
    if over not in OVER:
        raise unknown("rule coverage_mean: over", over, OVER)
    total, weight = zeros(old, torch.float64), zeros(old, torch.float64)
    total_weight = 0.0
    shared: dict[int, tuple[Reduction, float]] = {}  # clients of one reduction weigh together
    for reduction, values, scale in parts:
        if over == "moved":
            sent = reduction.extract({name: old[name] for name in values})
            moved = {name: value != sent[name] for name, value in values.items()}
            reduction.add_into(
                total, {name: torch.where(moved[name], v, 0) for name, v in values.items()}, scale
            )
            reduction.add_into(weight, {name: bits.double() for name, bits in moved.items()}, scale)
        else:
            reduction.add_into(total, values, scale)
            shared[id(reduction)] = (
                reduction,
                shared.get(id(reduction), (reduction, 0.0))[1] + scale,
            )
        total_weight += scale
    for reduction, scale in shared.values():
        reduction.add_into(weight, None, scale)
    return WeightedSums(total, weight, torch.tensor(total_weight, dtype=torch.float64))


def mean_from_sums(old: Params, sums: WeightedSums, over: str = "coverage") -> Params:
    """The second half of `coverage_mean`: divide, and keep what nobody trained."""
    total_weight = float(sums.total_weight)

    def mean_of_one(tensor: Tensor, total: Tensor, weight: Tensor) -> Tensor:
        mean = total / weight
        if over == "clients" and total_weight:
            mean = tensor.double() + (mean - tensor.double()) * weight / total_weight
        return torch.where(weight > 0, mean, tensor.double()).to(tensor.dtype)

    return map_elementwise(mean_of_one, flatten_if_cuda(old), sums.total, sums.weight)


def trimmed_mean(old: Params, parts: Iterable[WeightedUpdate], *, share: float = 0.1) -> Params:
    """Each entry's mean without the largest and smallest `share` of the values that clients gave for it; unweighted."""
    if not 0 <= share < 0.5:
        raise InvalidValue(f"rule trimmed_mean: share must be in [0, 0.5); got {share}")

    def middle(values_CS: Tensor, held_CS: Tensor) -> Tensor:
        count_S = held_CS.sum(0)
        cut_S = torch.minimum(
            (count_S * share + 1e-9).floor(), (count_S - 1) // 2
        )  # one or two always stay
        ordered_CS = torch.where(held_CS, values_CS, torch.inf).sort(0).values
        place_C1 = torch.arange(len(values_CS), device=values_CS.device).view(
            -1, *[1] * (values_CS.ndim - 1)
        )
        inside_CS = (place_C1 >= cut_S) & (place_C1 < count_S - cut_S)
        return torch.where(inside_CS, ordered_CS, 0).sum(0) / inside_CS.sum(0)

    return reduce_stacked(middle, old, list(parts))


def median(old: Params, parts: Iterable[WeightedUpdate]) -> Params:
    """Each entry's median over the clients that trained it; unweighted."""

    def middle(values_CS: Tensor, held_CS: Tensor) -> Tensor:
        ordered_CS = torch.where(held_CS, values_CS, torch.inf).sort(0).values
        count_S = held_CS.sum(0)
        low_1S, high_1S = ((count_S - 1).clamp_min(0) // 2)[None], (count_S // 2)[None]
        pair = [
            ordered_CS.gather(0, place.clamp(max=len(values_CS) - 1))[0]
            for place in (low_1S, high_1S)
        ]
        return (pair[0] + pair[1]) / 2

    return reduce_stacked(middle, old, list(parts))


def reduce_stacked(
    one_tensor: Callable[[Tensor, Tensor], Tensor], old: Params, parts: Sequence[WeightedUpdate]
) -> Params:
    """Lift a function of all clients' values of one tensor (and who holds what) to a rule."""
    if not parts:
        return dict(old)
    new: Params = {}
    for name, tensor in old.items():
        values, held = [], []
        for reduction, params, _ in parts:
            target = zeros({name: tensor}, torch.float64)
            reduction.add_into(target, {name: params[name]} if name in params else {}, 1.0)
            values.append(target[name])
            held.append(reduction.mask({name: tensor})[name])
        held_CS = torch.stack(held)
        found = one_tensor(torch.stack(values), held_CS)
        new[name] = torch.where(held_CS.any(0), found, tensor.double()).to(tensor.dtype)
    return new


def change(old: Params, trained: Reduction, values: Params) -> Params:
    """How a client moved the entries that it trained, in the full shapes and in float64; zero elsewhere.

    >>> from fedcover.submodels.reductions import Masks
    >>> held = Masks({"w": torch.tensor([True, False])})
    >>> change({"w": torch.tensor([1.0, 1.0])}, held, {"w": torch.tensor([1.5, 9.0])})["w"].tolist()
    [0.5, 0.0]
    """
    moved = zeros(old, torch.float64)
    trained.add_into(moved, values, 1.0)
    trained.add_into(moved, trained.extract({name: old[name] for name in values}), -1.0)
    return moved


def global_norm(tensors: Params) -> float:
    """The Euclidean length of all tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def clip_update(old: Params, trained: Reduction, values: Params, limit: float) -> Params:
    """A client's values with its whole update scaled to a length of at most `limit`; shorter ones stay bit for bit.

    >>> from fedcover.submodels.reductions import Masks
    >>> clip_update({"w": torch.zeros(2)}, Masks({}), {"w": torch.tensor([3.0, 4.0])}, 1.0)["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    moved = change(old, trained, values)
    far = global_norm(moved)
    if far <= limit:
        return values
    near = {name: old[name].double() + tensor * (limit / far) for name, tensor in moved.items()}
    part = trained.extract({name: near[name] for name in values})
    return {name: tensor.to(values[name].dtype) for name, tensor in part.items()}


RULES: dict[str, Rule] = {
    "coverage_mean": coverage_mean,
    "trimmed_mean": trimmed_mean,
    "median": median,
}

WEIGHTS: dict[str, Callable[[Client], float]] = {
    "uniform": lambda client: 1.0,
    "samples": lambda client: float(client.samples),
}
"""How much a client counts: all the same, as in the paper, or by its number of samples."""

UNCOVERED: dict[str, Callable[[Tensor], Tensor]] = {
    "keep": lambda tensor: tensor,
    "zero": torch.zeros_like,
}
"""What an entry that nobody trained becomes: its old value, or zero as in some public codes."""


# ── the server's own optimiser ──────────────────────────────────────────────────────────────────────────
