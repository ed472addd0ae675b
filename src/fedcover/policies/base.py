"""Helpers for policies: decorators, capacity limits, and checks of what a policy returns."""

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
from fedcover.types import Client, Params, PolicyFunction, Reduction, View

Options = ParamSpec("Options")


def per_client(
    choose: Callable[Concatenate[View, Client, Options], Reduction | None],
) -> PolicyFunction:
    """Turn a function of one client into a policy for the whole cohort.

    Args:
        choose: A function of the view and one client that returns the client's reduction. It
            returns None if the client sits out. Its keyword-only parameters become options of
            the policy, as in `mine(far=true)`.

    Returns:
        A policy that calls `choose` for every client of the cohort.
    """

    @wraps(choose)
    def policy(view: View, **options: Any) -> list[Reduction | None]:
        return [choose(view, client, **options) for client in view.cohort]  # type: ignore[call-arg]

    return policy


def per_capacity(
    choose: Callable[Concatenate[View, float, Options], Reduction | None],
) -> PolicyFunction:
    """Turn a function of a capacity into a policy; clients of equal capacity share a reduction."""

    @wraps(choose)
    def policy(view: View, **options: Any) -> list[Reduction | None]:
        reductions: dict[float, Reduction | None] = {}
        for client in view.cohort:
            if client.capacity not in reductions:
                reduction = choose(view, client.capacity, **options)  # type: ignore[call-arg]
                reductions[client.capacity] = reduction
        return [reductions[client.capacity] for client in view.cohort]

    return policy


def width(view: View, capacity: float) -> float:
    """Return the share of every group's units that fits a capacity under the view's measure."""
    if not view.groups and capacity < 1:
        raise InvalidValue(
            f"this model has no units to cut, so a device of capacity {capacity:g} can hold no "
            "part of it (docs/tracing.md lists what is left whole, and why)"
        )
    if view.measure == "width":
        return capacity
    return width_for_budget(view.groups, view.params, capacity)


def prunable_weights(view: View) -> Params:
    """Return the weights that pruning may remove.

    A model without any is an error: every device would receive all of it.
    """
    if not view.prunable:
        raise InvalidValue(
            "pruning needs a model that names prunable weights, and this one names none: "
            "fc.Model(module, groups, prunable=('hidden.weight', ...)), or a model given as a "
            "bare nn.Module, for which they are found"
        )
    return {name: view.params[name] for name in view.prunable}


def prunable_budget(view: View, capacity: float) -> int:
    """Return how many prunable weights fit a capacity under the view's measure.

    Under `width` the capacity is a share of the prunable weights. Under `parameters` it is a share
    of all parameters, from which those that are never pruned are subtracted.
    """
    prunable = sum(weight.numel() for weight in prunable_weights(view).values())
    if view.measure == "width":
        return int(capacity * prunable + 1e-9)
    total = sum(tensor.numel() for tensor in view.params.values())
    budget = int(capacity * total + 1e-9) - (total - prunable)
    if budget < 1:
        least = ceil(10_000 * (total - prunable + 1) / total) / 10_000
        raise InvalidValue(
            f"capacity must be at least {least:.4f} to prune this model "
            f"(the rest is never pruned); got {capacity:g}"
        )
    return budget


def fits(view: View, capacity: float, reduction: Reduction) -> bool:
    """Return whether a device of this capacity can hold a reduction."""
    if isinstance(reduction, Slices):
        share = width(view, capacity)
        return all(
            len(reduction.kept[group.name]) <= num_units_kept(group.size, share)
            for group in view.groups
        )
    sizes = reduction.sizes({name: view.params[name] for name in view.prunable})
    return sum(sizes.values()) <= prunable_budget(view, capacity)


def check_reductions(view: View, parts: Sequence[Reduction | None]) -> None:
    """Check what a user-defined policy returned.

    Raises:
        InvalidValue: If there is not one entry per client, or if a reduction is invalid for this
            model or exceeds its client's capacity.
    """
    if not isinstance(parts, Sequence):
        raise InvalidValue(
            f"policy must give a list of {len(view.cohort)} reductions; got {type(parts).__name__}"
        )
    if len(parts) != len(view.cohort):
        raise InvalidValue(
            f"policy must give {len(view.cohort)} reductions, one for each client; got {len(parts)}"
        )
    for client, part in zip(view.cohort, parts, strict=True):
        if part is not None:
            _check_reduction(view, client, part)


def _check_reduction(view: View, client: Client, reduction: Reduction) -> None:
    if not hasattr(reduction, "extract"):
        raise InvalidValue(
            "policy must give a Slices, a Masks or None "
            f"to client {client.id}; got {reduction!r:.80}"
        )
    violation = None
    if isinstance(reduction, Slices):
        violation = _slices_violation(view, reduction)
    elif isinstance(reduction, Masks):
        violation = _masks_violation(view, reduction)
    if violation:
        raise InvalidValue(f"policy gives client {client.id} {violation}")
    if not fits(view, client.capacity, reduction):
        raise InvalidValue(
            f"policy gives client {client.id} more than its capacity of {client.capacity:g} holds"
        )


def _slices_violation(view: View, slices: Slices) -> str | None:
    """Describe why slices are not valid for this model; return None if they are."""
    sizes = {group.name: group.size for group in view.groups}
    if slices.groups != view.groups and separate_buffers(slices.groups, view.params) != view.groups:
        return "a part of other groups than view.groups, which say what is cut"
    if slices.kept.keys() != sizes.keys():
        return f"units of the groups {sorted(slices.kept)}; this model has {sorted(sizes)}"
    for name, units in slices.kept.items():
        if not _are_sorted_units(units, sizes[name]):
            return (
                f"invalid units in group {name!r}: expected a sorted 1-D int64 tensor "
                f"of values in 0..{sizes[name] - 1}"
            )
    for group in view.groups:
        units = slices.kept[group.name]
        if group.nested and units[-1] >= len(units):
            return f"units of {group.name!r} that are not its first ones, but that group is nested"
    return None


def _masks_violation(view: View, masks: Masks) -> str | None:
    """Describe why masks are not valid for this model; return None if they are."""
    for name, bits in masks.bits.items():
        if name not in view.params:
            return f"a mask of {name!r}, which is not a tensor of this model"
        shape = tuple(view.params[name].shape)
        is_boolean = isinstance(bits, Tensor) and bits.dtype == torch.bool
        if not is_boolean or tuple(bits.shape) != shape:
            return f"a mask of {name!r} that is not a tensor of booleans of shape {shape}"
    return None


def _are_sorted_units(units: object, size: int) -> bool:
    if not isinstance(units, Tensor) or units.dtype != torch.int64 or units.ndim != 1:
        return False
    if not len(units):
        return False
    return bool(units[0] >= 0 and units[-1] < size and (units[1:] > units[:-1]).all())


def deduplicate(
    parts: Iterable[Reduction | None], recent: dict[bytes, Slices]
) -> list[Reduction | None]:
    """Replace equal slices by one shared object, so that work on them is done once.

    `recent` holds the slices of the previous round by their encoding. They are reused where
    possible, and `recent` is updated to the slices of this round.
    """
    reductions = list(parts)
    # a policy may already share objects: encode each object only once
    slices_by_id = {id(part): part for part in reductions if isinstance(part, Slices)}
    codes = {key: encode(part) for key, part in slices_by_id.items()}
    current: dict[bytes, Slices] = {}
    unique: list[Reduction | None] = []
    for part in reductions:
        if isinstance(part, Slices):
            code = codes[id(part)]
            if code not in current:
                current[code] = recent.get(code, part)
            unique.append(current[code])
        else:
            unique.append(part)
    recent.clear()
    recent.update(current)
    return unique
