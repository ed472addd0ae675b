"""The proof of traced groups: what is sliced says and learns what the masked whole says and learns."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fedcover.errors import InvalidValue
from fedcover.models import params_and_buffers
from fedcover.rng import generator, seeded
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import Slices
from fedcover.submodels.tracing.extract_groups import whole_hint
from fedcover.submodels.tracing.masked_ops import Float64Mode, MaskedMode
from fedcover.submodels.tracing.tracer import ModuleStack, TracedOp, TraceRecord
from fedcover.submodels.tracing.unit_labels import Field
from fedcover.types import Params, UnitGroup

DRAWS = 3
"""How many random choices of units, drawn for all groups at once, a proof tries at least."""

TOLERANCE = 1e-8
"""What float64 may differ by, relative to the largest entry."""

PERTURBATIONS, PERTURBATION, ROUNDING_MARGIN = 4, 1e-14, 10
"""Where more differs: how often and how far weights are moved to see what rounding does; how much more may differ."""

MAX_ROUNDING_ERROR = 1e-3
"""Where rounding alone changes this much, nothing is compared any more."""


@dataclass(frozen=True)
class VerificationCase:
    """A model in float64 with its inputs, values that hide nothing, and what was seen when it was traced."""

    module: nn.Module
    inputs: tuple[Any, ...]
    values: Params
    groups: tuple[UnitGroup, ...]
    notes: TraceRecord


@dataclass(frozen=True)
class ModelResult:
    """What a model said, while training and when evaluated, and learned: gradients and statistics."""

    outputs: list[Tensor]
    gradients_and_buffers: Params

    def named_results(self) -> Params:
        """All that is compared, by name."""
        return {
            **self.gradients_and_buffers,
            **{f"output {i}": tensor for i, tensor in enumerate(self.outputs)},
        }


def verify_groups(
    module: nn.Module, example: tuple[Any, ...], groups: tuple[UnitGroup, ...], notes: TraceRecord
) -> None:
    """Refuse groups for which a sliced model differs from the masked one, naming the group and the place."""
    if not groups:
        return
    dense = copy.deepcopy(module).double()
    case = VerificationCase(
        dense,
        tuple(map(_double, example)),
        {**params_and_buffers(dense), **_random_weights(dense)},
        groups,
        notes,
    )
    for draw in range(max(DRAWS, len(groups).bit_length())):
        kept = {
            group.name: _random_units(group.size, draw, i >> draw & 1)
            for i, group in enumerate(groups)
        }
        found = _difference(case, kept)
        if found is None:
            continue
        for group in groups:  # one by one, to name the culprit
            alone = {g.name: kept[g.name] if g is group else torch.arange(g.size) for g in groups}
            this = _difference(case, alone)
            if this is not None:
                raise _mismatch_error([group.name], this)
        raise _mismatch_error([group.name for group in groups], found)


def _mismatch_error(names: Sequence[str], found: str) -> InvalidValue:
    return InvalidValue(
        f"tracing: cutting {', '.join(map(repr, names))} is not the same as masking it: {found}; "
        f"keep these units whole: {whole_hint(names)}"
    )


def _random_units(size: int, draw: int, others: int) -> Tensor:
    """A random part of a group's units, never all, or just the others; not one unit, which has no spread, if possible.

    Groups of the same size draw alike, but any two of them differ in some draw by having just the others: so a
    coupling that was overlooked shows.
    """
    draws = generator(0, "proof", size, draw)
    least = 1 + (size > 3)
    number = least + int(torch.randint(size - 2 * least + 1, (), generator=draws))
    order = torch.randperm(size, generator=draws)
    return (order[number:] if others else order[:number]).sort().values


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _random_weights(module: nn.Module) -> Params:
    """Weights without zeros and equal values, which would hide a difference, and of a size that passes signals on."""
    draws = generator(0, "proof", "weights")

    def drawn(weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return torch.rand(weight.shape, generator=draws, dtype=torch.float64) + 0.5
        return torch.randn(weight.shape, generator=draws, dtype=torch.float64) / sqrt(
            weight[0].numel()
        )

    return {name: drawn(weight) for name, weight in module.named_parameters()}


def _difference(case: VerificationCase, kept: dict[str, Tensor]) -> str | None:
    """Where sliced and masked differ, in words; None where they agree."""
    slices = Slices(case.groups, kept)
    try:
        small = submodel(case.module, slices, case.values)
    except InvalidValue as error:
        return str(error)
    module_stack, modes = ModuleStack(small), (Float64Mode(), Float64Mode())
    try:
        sliced = _forward_backward(case, small, modes)
    except Exception as error:
        last_function = next(
            (mode.last_function for mode in reversed(modes) if mode.last_function), ""
        )
        return f"operation {last_function!r} in {module_stack} fails on the sliced model ({error})"
    masked = _masked_model(case, slices)
    whole = _forward_backward(
        case, masked, (_masked_mode(case, slices), _masked_mode(case, slices))
    )
    mine, theirs = (
        sliced.named_results(),
        ModelResult(whole.outputs, slices.extract(whole.gradients_and_buffers)).named_results(),
    )
    wrong = [name for name in theirs if not _close(mine.get(name), theirs[name])]
    if wrong:
        blur = _rounding_error(case, slices, whole)
        wrong = [name for name in wrong if not _close(mine.get(name), theirs[name], blur[name])]
    if not wrong:
        return None
    step = _first_mismatching_op(case, slices)
    return (
        f"{step} gives another result"
        if step
        else f"the gradient or statistic {wrong[0]!r} differs"
    )


def _rounding_error(case: VerificationCase, slices: Slices, whole: ModelResult) -> dict[str, float]:
    """What rounding may change in each result: batch norm over two rows divides what is left of a difference by itself.

    Measured, not estimated: the masked model a few times more, with weights that differ in the last digits.
    """
    blur = dict.fromkeys(whole.named_results(), 0.0)
    for number in range(PERTURBATIONS):
        draws = generator(0, "proof", "shake", number)
        moved = {
            name: tensor
            * (1 + PERTURBATION * torch.randn(tensor.shape, generator=draws, dtype=torch.float64))
            for name, tensor in case.values.items()
            if tensor.is_floating_point()
        }
        shaken = replace(case, values={**case.values, **moved})
        other = _forward_backward(
            shaken,
            _masked_model(shaken, slices),
            (_masked_mode(case, slices), _masked_mode(case, slices)),
        ).named_results()
        for name, tensor in whole.named_results().items():
            blur[name] = max(blur[name], ROUNDING_MARGIN * _distance(tensor, other[name]))
    for name, tensor in whole.named_results().items():
        if blur[name] > MAX_ROUNDING_ERROR * _scale(tensor):
            raise InvalidValue(
                f"tracing: rounding alone changes {name!r} too much on this example to compare sliced with masked "
                "(batch norm over two values, for example): give an example of more rows"
            )
    return blur


def _distance(left: Tensor, right: Tensor) -> float:
    difference = left.detach().double() - right.detach().double()
    return float(difference.nan_to_num().abs().max()) if difference.numel() else 0.0


def _masked_model(case: VerificationCase, slices: Slices) -> nn.Module:
    """The whole model with zeros where units are cut."""
    mask = slices.mask(case.values)
    values = {name: torch.where(mask[name], tensor, 0) for name, tensor in case.values.items()}
    return load_tensors(copy.deepcopy(case.module), values)


def _masked_mode(case: VerificationCase, slices: Slices) -> MaskedMode:
    """How the masked model runs: its averages know which units are there."""
    gone = _cut_atoms(case, slices)
    return MaskedMode([_present(case, fields, gone) for fields in case.notes.averaged_fields])


def _forward_backward(
    case: VerificationCase, module: nn.Module, modes: tuple[Float64Mode, Float64Mode]
) -> ModelResult:
    """Run a model forward and backward while training, then forward as it is evaluated."""
    outputs = _forward(module.train(), case.inputs, modes[0])
    draws = generator(0, "proof", "direction")
    directions = [torch.randn(o.shape, generator=draws, dtype=torch.float64) for o in outputs]
    loss = sum(
        ((o * d).sum() for o, d in zip(outputs, directions, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    slopes = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    gradients_and_buffers = {
        n: torch.zeros_like(w) if s is None else s
        for (n, w), s in zip(weights.items(), slopes, strict=True)
    }
    outputs = outputs + _forward(module.eval(), case.inputs, modes[1])
    return ModelResult(outputs, gradients_and_buffers | dict(module.named_buffers()))


def _forward(module: nn.Module, inputs: tuple[Any, ...], mode: Float64Mode) -> list[Tensor]:
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
    with seeded(0, "proof"), mode:
        out = module(*[each.clone() if isinstance(each, Tensor) else each for each in inputs])
    return [
        each
        for each in tree_flatten(out)[0]
        if isinstance(each, Tensor) and each.is_floating_point()
    ]


def _first_mismatching_op(case: VerificationCase, slices: Slices) -> TracedOp | None:
    """The first operation of the model's code whose result differs between sliced and masked."""
    recorded: list[list[Tensor]] = []
    for module, mode in (
        (submodel(case.module, slices, case.values), Float64Mode()),
        (_masked_model(case, slices), _masked_mode(case, slices)),
    ):
        mode.recorded = []
        _forward(module.train(), case.inputs, mode)
        recorded.append([out.detach() for out in mode.recorded])
    gone = _cut_atoms(case, slices)
    for step, small, large in zip(case.notes.traced_ops, recorded[0], recorded[1], strict=False):
        present = _present(case, step.fields, gone)
        if not _close(
            small.flatten(),
            large.flatten() if present is None else large[present.expand(step.shape)],
        ):
            return step
    return None


def _cut_atoms(case: VerificationCase, slices: Slices) -> Tensor:
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


def _present(case: VerificationCase, fields: Sequence[Field], gone: Tensor) -> Tensor | None:
    """Where a tensor with these fields is still there; None where all of it is."""
    masks = [~torch.isin(case.notes.labels.atoms.roots(field), gone) for field in fields]
    if all(bool(mask.all()) for mask in masks):
        return None
    present = masks[0]
    for mask in masks[1:]:
        present = present & mask
    return present.clone()


def _scale(tensor: Tensor) -> float:
    return (
        max(1.0, float(tensor.detach().double().nan_to_num().abs().max()))
        if tensor.numel()
        else 1.0
    )


def _close(left: Tensor | None, right: Tensor, blur: float = 0.0) -> bool:
    """Whether two tensors are the same but for rounding, and for what rounding is known to change."""
    if left is None or left.shape != right.shape:
        return False
    left, right = left.detach().double(), right.detach().double()
    return torch.allclose(
        left, right, rtol=TOLERANCE, atol=max(TOLERANCE * _scale(right), blur), equal_nan=True
    )
