"""The proof of traced groups: what is sliced says and learns what the masked whole says and learns."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fedcover.errors import InvalidValue
from fedcover.models import tensors
from fedcover.reduction import Slices
from fedcover.rng import generator, seeded
from fedcover.submodel import fill, submodel
from fedcover.tracing.labels import Field
from fedcover.tracing.twins import Masked, Quiet
from fedcover.tracing.watch import Notes, Place
from fedcover.types import Params, UnitGroup

DRAWS = 3
"""How many random choices of units, drawn for all groups at once, a proof tries at least."""

TOLERANCE = 1e-8
"""What float64 may differ by, relative to the largest entry."""


@dataclass(frozen=True)
class Case:
    """A model in float64 with its inputs, values that hide nothing, and what was seen when it was traced."""

    module: nn.Module
    given: tuple[Any, ...]
    values: Params
    groups: tuple[UnitGroup, ...]
    notes: Notes


@dataclass(frozen=True)
class Answer:
    """What a model said (while training, then when evaluated) and learned, and what its parts said on the way."""

    said: list[Tensor]
    learned: Params
    steps: list[Tensor]


def prove(module: nn.Module, example: tuple[Any, ...], groups: tuple[UnitGroup, ...], notes: Notes) -> None:
    """Refuse groups for which a sliced model differs from the masked one, naming the group and the place."""
    if not groups:
        return
    dense = copy.deepcopy(module).double()
    case = Case(dense, tuple(map(_double, example)), {**tensors(dense), **_random(dense)}, groups, notes)
    for draw in range(max(DRAWS, len(groups).bit_length())):
        kept = {group.name: _some(group.size, draw, i >> draw & 1) for i, group in enumerate(groups)}
        found = _difference(case, kept)
        if found is None:
            continue
        for group in groups:  # one by one, to name the culprit
            alone = {g.name: kept[g.name] if g is group else torch.arange(g.size) for g in groups}
            this = _difference(case, alone)
            if this is not None:
                raise _refusal([group.name], this)
        raise _refusal([group.name for group in groups], found)


def _refusal(names: Sequence[str], found: str) -> InvalidValue:
    listed = ", ".join(map(repr, names))
    return InvalidValue(
        f"tracing: cutting group {listed} is not the same as masking it: {found}; keep it whole with whole=({listed},)"
    )


def _some(size: int, draw: int, others: int) -> Tensor:
    """A random part of a group's units, at least one and never all; or just the others.

    Groups of the same size draw alike, but any two of them differ in some draw by having just the others: so a
    coupling that was overlooked shows.
    """
    draws = generator(0, "proof", size, draw)
    number = 1 + int(torch.randint(size - 1, (), generator=draws))
    order = torch.randperm(size, generator=draws)
    return (order[number:] if others else order[:number]).sort().values


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _random(module: nn.Module) -> Params:
    """Weights without zeros and equal values, which would hide a difference, and of a size that passes signals on."""
    draws = generator(0, "proof", "weights")

    def drawn(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return torch.rand(weight.shape, generator=draws, dtype=torch.float64) + 0.5
        return torch.randn(weight.shape, generator=draws, dtype=torch.float64) / sqrt(weight[0].numel())

    return {name: drawn(weight) for name, weight in module.named_parameters()}


def _difference(case: Case, kept: dict[str, Tensor]) -> str | None:
    """Where sliced and masked differ, in words; None where they agree."""
    slices = Slices(case.groups, kept)
    try:
        small = submodel(case.module, slices, case.values)
    except InvalidValue as error:
        return str(error)
    place = Place(small)
    try:
        sliced = _answer(case, small, place, (Quiet(), Quiet()))
    except Exception as error:
        return f"{place} fails on the sliced model ({error})"
    gone = _gone(case, slices)
    present = [_present(case, fields, gone) for fields in case.notes.moments]
    mask = slices.mask(case.values)
    values = {name: torch.where(mask[name], tensor, 0) for name, tensor in case.values.items()}
    masked = fill(copy.deepcopy(case.module), values)
    whole = _answer(case, masked, Place(masked), (Masked(present), Masked(present)))
    return _first_difference(case, slices, sliced, whole, gone)


def _answer(case: Case, module: nn.Module, place: Place, modes: tuple[Quiet, Quiet]) -> Answer:
    """Run a model forward and backward while training, then forward as it is evaluated."""
    steps: list[Tensor] = []
    place.follow(lambda path, out: steps.append(out) if isinstance(out, Tensor) else None)
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention):
            layer.dropout = 0.0
    said = _run(module.train(), case.given, modes[0])
    draws = generator(0, "proof", "direction")
    directions = [torch.randn(o.shape, generator=draws, dtype=torch.float64) for o in said]
    loss = sum(((o * d).sum() for o, d in zip(said, directions, strict=True)), torch.zeros((), dtype=torch.float64))
    weights = dict(module.named_parameters())
    slopes = torch.autograd.grad(loss, [w for w in weights.values() if w.requires_grad], allow_unused=True)
    names = [name for name, weight in weights.items() if weight.requires_grad]
    learned = {name: slope for name, slope in zip(names, slopes, strict=True) if slope is not None}
    said += _run(module.eval(), case.given, modes[1])
    return Answer(said, learned | dict(module.named_buffers()), steps)


def _run(module: nn.Module, given: tuple[Any, ...], mode: Quiet) -> list[Tensor]:
    with seeded(0, "proof"), mode:
        out = module(*[each.clone() if isinstance(each, Tensor) else each for each in given])
    return [each for each in tree_flatten(out)[0] if isinstance(each, Tensor) and each.is_floating_point()]


def _gone(case: Case, slices: Slices) -> Tensor:
    """The classes of atoms that are cut."""
    atoms, lost = case.notes.labels.atoms, []
    for group in slices.groups:
        cut = next(cut for cut in group.cuts)
        assert cut.axis is not None
        units = torch.ones(group.size, dtype=torch.bool)
        units[slices.kept[group.name]] = False
        first = cut.start + units.nonzero().flatten() * cut.per_unit
        lost.append(atoms.roots(case.notes.labels.axes[cut.tensor, cut.axis])[first])
    return torch.cat(lost)


def _present(case: Case, fields: Sequence[Field], gone: Tensor) -> Tensor | None:
    """Where a tensor with these fields is still there; None where all of it is."""
    masks = [~torch.isin(case.notes.labels.atoms.roots(field), gone) for field in fields]
    if all(bool(mask.all()) for mask in masks):
        return None
    present = masks[0]
    for mask in masks[1:]:
        present = present & mask
    return present.clone()


def _first_difference(case: Case, slices: Slices, sliced: Answer, whole: Answer, gone: Tensor) -> str | None:
    """The first part of the model whose output differs, or a gradient that does."""
    learned = slices.extract(whole.learned)
    same = all(_close(a, b) for a, b in zip(sliced.said, whole.said, strict=True)) and all(
        _close(sliced.learned[name], learned[name]) if name in sliced.learned else not bool(learned[name].any())
        for name in learned
    )
    if same:
        return None
    for (path, shape, fields), small, large in zip(case.notes.outputs, sliced.steps, whole.steps, strict=False):
        present = _present(case, fields, gone)
        shown = large.flatten() if present is None else large[present.expand(shape)]
        if not _close(small.flatten(), shown):
            layer = case.module.get_submodule(path)
            return f"the output of {path or 'the model'} ({type(layer).__name__}) differs"
    bad = [name for name in learned if name not in sliced.learned or not _close(sliced.learned[name], learned[name])]
    return f"the gradient of {bad[0]!r} differs" if bad else "the evaluated output differs"


def _close(left: Tensor, right: Tensor) -> bool:
    left, right = left.detach(), right.detach()
    if left.shape != right.shape:
        return False
    scale = max(1.0, float(right.abs().max())) if right.numel() and right.is_floating_point() else 1.0
    return torch.allclose(left.double(), right.double(), rtol=TOLERANCE, atol=TOLERANCE * scale)
