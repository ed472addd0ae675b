"""What policies share: lifting a function of one client to a cohort, what a capacity allows, equal parts as one."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import ceil
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.submodels.encoding import encode
from fedcover.submodels.reductions import Masks, Slices, width_for_budget
from fedcover.submodels.unit_groups import num_units_kept, separate_buffers
from fedcover.types import Client, Params, Policy, Reduction, View

Options = ParamSpec("Options")


def per_client(choose: Callable[Concatenate[View, Client, Options], Reduction | None]) -> Policy:
    """Turn a function that gives one client its reduction into a policy for the whole cohort.

    Keyword-only parameters of the function become options of the policy: `mine(far=true)`.
    """

    @wraps(choose)
    def policy(view: View, **options: Any) -> list[Reduction | None]:
        return [choose(view, client, **options) for client in view.cohort]  # type: ignore[call-arg]

    return policy


def per_capacity(choose: Callable[Concatenate[View, float, Options], Reduction | None]) -> Policy:
    """The same for policies that treat all clients of one capacity alike: their part is made once and shared."""

    @wraps(choose)
    def policy(view: View, **options: Any) -> list[Reduction | None]:
        capacities = dict.fromkeys(client.capacity for client in view.cohort)
        made = {capacity: choose(view, capacity, **options) for capacity in capacities}  # type: ignore[call-arg]
        return [made[client.capacity] for client in view.cohort]

    return policy


def width(view: View, capacity: float) -> float:
    """The share of every group's units that fits a capacity under the view's measure."""
    if not view.groups and capacity < 1:
        raise InvalidValue(
            f"this model has no units to cut, so a device of capacity {capacity:g} can hold no part of it "
            "(docs/tracing.md lists what is left whole, and why)"
        )
    if view.measure == "width":
        return capacity
    return width_for_budget(view.groups, view.params, capacity)


def prunable_weights(view: View) -> Params:
    """The weights that pruning may touch; a model without any would be given whole to every device."""
    if not view.prunable:
        raise InvalidValue(
            "pruning needs a model that names prunable weights, and this one names none: fc.Model(module, groups, "
            "prunable=('hidden.weight', ...)), or a model given as a bare nn.Module, whose are found"
        )
    return {name: view.params[name] for name in view.prunable}


def prunable_budget(view: View, capacity: float) -> int:
    """How many of the prunable weights fit a capacity: a share of them, or what the parameter budget leaves."""
    prunable = sum(weight.numel() for weight in prunable_weights(view).values())
    if view.measure == "width":
        return int(capacity * prunable + 1e-9)
    total = sum(tensor.numel() for tensor in view.params.values())
    budget = int(capacity * total + 1e-9) - (total - prunable)
    if budget < 1:
        least = ceil(10_000 * (total - prunable + 1) / total) / 10_000
        raise InvalidValue(
            f"capacity must be at least {least:.4f} to prune this model (the rest is never pruned); got {capacity:g}"
        )
    return budget


def fits(view: View, capacity: float, reduction: Reduction) -> bool:
    """Whether a device of some capacity can hold a reduction."""
    if isinstance(reduction, Slices):
        share = width(view, capacity)
        return all(
            len(reduction.kept[group.name]) <= num_units_kept(group.size, share)
            for group in view.groups
        )
    kept = reduction.sizes({name: view.params[name] for name in view.prunable})
    return sum(kept.values()) <= prunable_budget(view, capacity)


def check_reductions(view: View, parts: Sequence[Reduction | None]) -> None:
    """Refuse what a policy of a user's own must not give: too few parts, no parts at all, more than a device holds."""
    if not isinstance(parts, Sequence):
        raise InvalidValue(
            f"policy must give a list of {len(view.cohort)} reductions; got {type(parts).__name__}"
        )
    if len(parts) != len(view.cohort):
        raise InvalidValue(
            f"policy must give {len(view.cohort)} reductions, one for each client; got {len(parts)}"
        )
    for client, part in zip(view.cohort, parts, strict=True):
        if part is None:
            continue
        if not hasattr(part, "extract"):
            raise InvalidValue(
                f"policy must give a Slices, a Masks or None to client {client.id}; got {part!r:.80}"
            )
        if wrong := _find_violation(view, part):
            raise InvalidValue(f"policy gives client {client.id} {wrong}")
        if not fits(view, client.capacity, part):
            raise InvalidValue(
                f"policy gives client {client.id} more than its capacity of {client.capacity:g} holds"
            )


def _find_violation(view: View, part: Reduction) -> str | None:
    """What makes a part none of this model, in words."""
    if isinstance(part, Slices):
        sizes = {group.name: group.size for group in view.groups}
        if part.groups != view.groups and separate_buffers(part.groups, view.params) != view.groups:
            return "a part of other groups than view.groups, which say what is cut"
        if part.kept.keys() != sizes.keys():
            return f"units of the groups {sorted(part.kept)}; this model has {sorted(sizes)}"
        wrong = [n for n, kept in part.kept.items() if not _are_units(kept, sizes[n])]
        if wrong:
            return (
                f"in group {wrong[0]!r} no units in order, of 0..{sizes[wrong[0]] - 1} (int64, 1-D)"
            )
        nested = [
            g.name
            for g in view.groups
            if g.nested and part.kept[g.name][-1] >= len(part.kept[g.name])
        ]
        return (
            f"units of {nested[0]!r}, which stand on each other, that must be the first ones"
            if nested
            else None
        )
    if isinstance(part, Masks):
        for name, bits in part.bits.items():
            if name not in view.params:
                return f"a mask of {name!r}, which is no tensor of this model"
            shape = tuple(view.params[name].shape)
            if (
                not isinstance(bits, Tensor)
                or bits.dtype != torch.bool
                or tuple(bits.shape) != shape
            ):
                return f"a mask of {name!r} that is no tensor of booleans of shape {shape}"
    return None


def _are_units(kept: object, size: int) -> bool:
    if not isinstance(kept, Tensor) or kept.dtype != torch.int64 or kept.ndim != 1 or not len(kept):
        return False
    return bool(kept[0] >= 0 and kept[-1] < size and (kept[1:] > kept[:-1]).all())


def deduplicate(
    parts: Iterable[Reduction | None], recent: dict[bytes, Slices]
) -> list[Reduction | None]:
    """The same parts; equal slices become one object, so that whatever is done with it is done once.

    `recent` holds those of the round before, and holds those of this round afterwards.
    """
    listed = list(parts)
    codes = {
        key: encode(part)
        for key, part in {id(part): part for part in listed}.items()
        if isinstance(part, Slices)
    }
    now: dict[bytes, Slices] = {}
    for part in listed:
        if isinstance(part, Slices):
            now.setdefault(codes[id(part)], recent.get(codes[id(part)], part))
    recent.clear()
    recent.update(now)
    return [now[codes[id(part)]] if isinstance(part, Slices) else part for part in listed]
