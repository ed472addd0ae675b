"""Verify traced groups numerically: sliced and masked models must compute and learn the same.

For several random choices of units, the sliced model is compared with the whole model in which the
same units are masked: outputs, gradients and buffers. Everything is computed in float64.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.models import params_and_buffers
from fedcover.rng import generator, seeded
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import Slices
from fedcover.submodels.tracing.extract_groups import whole_hint
from fedcover.submodels.tracing.masked_ops import Float64Mode, MaskedMode
from fedcover.submodels.tracing.tracer import ModuleStack, TracedOp, TraceRecord, copy_inputs
from fedcover.submodels.tracing.unit_labels import Field
from fedcover.tensors import tree_leaves
from fedcover.types import Params, UnitGroup

DRAWS = 3
"""The least number of random choices of units, drawn for all groups at once, that are tried."""

TOLERANCE = 1e-8
"""The difference that float64 may show, relative to the largest entry."""

PERTURBATIONS = 4
"""How often weights are perturbed to measure the effect of rounding, if results differ more."""

PERTURBATION = 1e-14
"""The relative size of these perturbations."""

ROUNDING_MARGIN = 10
"""The factor by which results may differ more than under the perturbations."""

MAX_ROUNDING_ERROR = 1e-3
"""The effect of rounding above which results cannot be compared."""

SEED_NAME = "proof"
"""The name of the random streams; another name would draw other units and weights."""


@dataclass(frozen=True)
class VerificationCase:
    """A model in float64 with its inputs, generic values, groups, and the record of its trace."""

    module: nn.Module
    inputs: tuple[Any, ...]
    values: Params
    groups: tuple[UnitGroup, ...]
    record: TraceRecord


@dataclass(frozen=True)
class ModelResult:
    """The outputs of a model in training and evaluation mode, with its gradients and buffers."""

    outputs: list[Tensor]
    gradients_and_buffers: Params

    def named_results(self) -> Params:
        """Return everything that is compared, by name."""
        outputs = {f"output {i}": tensor for i, tensor in enumerate(self.outputs)}
        return {**self.gradients_and_buffers, **outputs}


def verify_groups(
    module: nn.Module, example: tuple[Any, ...], groups: tuple[UnitGroup, ...], record: TraceRecord
) -> None:
    """Check that slicing the module along these groups equals masking it.

    Raises:
        InvalidValue: If they differ. The message names the group and the first operation that
            differs.
    """
    if not groups:
        return
    float64_module = copy.deepcopy(module).double()
    values = {**params_and_buffers(float64_module), **_random_weights(float64_module)}
    inputs = tuple(map(_to_double, example))
    case = VerificationCase(float64_module, inputs, values, groups, record)
    for draw in range(max(DRAWS, len(groups).bit_length())):
        units_by_group = {
            group.name: _random_units(group.size, draw, complement=bool(i >> draw & 1))
            for i, group in enumerate(groups)
        }
        difference = _difference(case, units_by_group)
        if difference is not None:
            _raise_mismatch(case, units_by_group, difference)


def _raise_mismatch(
    case: VerificationCase, units_by_group: dict[str, Tensor], difference: str
) -> None:
    """Raise an error for the first group that is wrong by itself, or for all groups together."""
    for group in case.groups:
        units_alone = {other.name: torch.arange(other.size) for other in case.groups}
        units_alone[group.name] = units_by_group[group.name]
        difference_alone = _difference(case, units_alone)
        if difference_alone is not None:
            raise _mismatch_error([group.name], difference_alone)
    raise _mismatch_error([group.name for group in case.groups], difference)


def _mismatch_error(names: Sequence[str], difference: str) -> InvalidValue:
    return InvalidValue(
        f"tracing: cutting {', '.join(map(repr, names))} is not the same as masking it: "
        f"{difference}; keep these units whole: {whole_hint(names)}"
    )


def _random_units(size: int, draw: int, *, complement: bool) -> Tensor:
    """Return a random subset of a group's units, never all, or its complement.

    The subset has more than one unit where possible, because a single unit has no variance. Groups
    of equal size draw the same subset, but any two groups differ in some draw by the complement.
    So a coupling that the trace missed is noticed.
    """
    random_stream = generator(0, SEED_NAME, size, draw)
    least = 1 + (size > 3)
    number = least + int(torch.randint(size - 2 * least + 1, (), generator=random_stream))
    order = torch.randperm(size, generator=random_stream)
    units = order[number:] if complement else order[:number]
    return units.sort().values


def _to_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _random_weights(module: nn.Module) -> Params:
    """Return weights without zeros and equal values, which would hide a difference.

    They are scaled so that signals pass through many layers.
    """
    random_stream = generator(0, SEED_NAME, "weights")
    values: Params = {}
    for name, weight in module.named_parameters():
        if weight.ndim < 2:
            noise = torch.rand(weight.shape, generator=random_stream, dtype=torch.float64)
            values[name] = noise + 0.5
        else:
            noise = torch.randn(weight.shape, generator=random_stream, dtype=torch.float64)
            values[name] = noise / sqrt(weight[0].numel())
    return values


def _difference(case: VerificationCase, units_by_group: dict[str, Tensor]) -> str | None:
    """Describe where the sliced and the masked model differ; return None if they agree."""
    slices = Slices(case.groups, units_by_group)
    try:
        sliced_model = submodel(case.module, slices, case.values)
    except InvalidValue as error:
        return str(error)
    module_stack, modes = ModuleStack(sliced_model), (Float64Mode(), Float64Mode())
    try:
        sliced = _forward_backward(case, sliced_model, modes).named_results()
    except Exception as error:
        called = [mode.last_function for mode in modes if mode.last_function]
        last_function = called[-1] if called else ""
        return f"operation {last_function!r} in {module_stack} fails on the sliced model ({error})"
    masked = _run_masked(case, slices)
    expected = ModelResult(
        masked.outputs, slices.extract(masked.gradients_and_buffers)
    ).named_results()
    wrong = [name for name in expected if not _close(sliced.get(name), expected[name])]
    if wrong:
        errors = _rounding_errors(case, slices, masked)
        wrong = [
            name for name in wrong if not _close(sliced.get(name), expected[name], errors[name])
        ]
    if not wrong:
        return None
    op = _first_mismatching_op(case, slices)
    if op is None:
        return f"the gradient or statistic {wrong[0]!r} differs"
    return f"{op} gives another result"


def _rounding_errors(
    case: VerificationCase, slices: Slices, masked: ModelResult
) -> dict[str, float]:
    """Measure how much rounding may change each result.

    Batch norm over two rows, for example, divides a small difference by itself. The masked model
    runs a few more times with weights that differ in the last digits.
    """
    results = masked.named_results()
    errors = dict.fromkeys(results, 0.0)
    for i in range(PERTURBATIONS):
        random_stream = generator(0, SEED_NAME, "shake", i)
        values = dict(case.values)
        for name, tensor in case.values.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=random_stream, dtype=torch.float64)
                values[name] = tensor * (1 + PERTURBATION * noise)
        perturbed = _run_masked(replace(case, values=values), slices).named_results()
        for name, tensor in results.items():
            error = ROUNDING_MARGIN * _distance(tensor, perturbed[name])
            errors[name] = max(errors[name], error)
    for name, tensor in results.items():
        if errors[name] > MAX_ROUNDING_ERROR * _scale(tensor):
            raise InvalidValue(
                f"tracing: rounding alone changes {name!r} too much on this example to compare "
                "sliced with masked (batch norm over two values, for example): "
                "give an example of more rows"
            )
    return errors


def _distance(left: Tensor, right: Tensor) -> float:
    difference = left.detach().double() - right.detach().double()
    return float(difference.nan_to_num().abs().max()) if difference.numel() else 0.0


def _run_masked(case: VerificationCase, slices: Slices) -> ModelResult:
    modes = (_masked_mode(case, slices), _masked_mode(case, slices))
    return _forward_backward(case, _masked_model(case, slices), modes)


def _masked_model(case: VerificationCase, slices: Slices) -> nn.Module:
    """Return the whole model with zeros where units are cut."""
    mask = slices.mask(case.values)
    values = {name: torch.where(mask[name], tensor, 0) for name, tensor in case.values.items()}
    return load_tensors(copy.deepcopy(case.module), values)


def _masked_mode(case: VerificationCase, slices: Slices) -> MaskedMode:
    """Return a mode in which averages are over the units that are kept."""
    cut_atoms = _cut_atoms(case, slices)
    return MaskedMode([_present(case, fields, cut_atoms) for fields in case.record.averaged_fields])


def _forward_backward(
    case: VerificationCase, module: nn.Module, modes: tuple[Float64Mode, Float64Mode]
) -> ModelResult:
    """Run a model forward and backward in training mode, then forward in evaluation mode."""
    outputs = _forward(module.train(), case.inputs, modes[0])
    random_stream = generator(0, SEED_NAME, "direction")
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        direction = torch.randn(output.shape, generator=random_stream, dtype=torch.float64)
        loss = loss + (output * direction).sum()
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    gradients_and_buffers: Params = {}
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        gradients_and_buffers[name] = torch.zeros_like(weight) if gradient is None else gradient
    outputs = outputs + _forward(module.eval(), case.inputs, modes[1])
    return ModelResult(outputs, gradients_and_buffers | dict(module.named_buffers()))


def _forward(module: nn.Module, inputs: tuple[Any, ...], mode: Float64Mode) -> list[Tensor]:
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
    with seeded(0, SEED_NAME), mode:
        out = module(*copy_inputs(inputs))
    tensors = [output for output in tree_leaves(out) if isinstance(output, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _first_mismatching_op(case: VerificationCase, slices: Slices) -> TracedOp | None:
    """Return the first operation of the model's code whose sliced and masked results differ."""
    sliced_results = _recorded_results(
        case, submodel(case.module, slices, case.values), Float64Mode()
    )
    masked_results = _recorded_results(
        case, _masked_model(case, slices), _masked_mode(case, slices)
    )
    cut_atoms = _cut_atoms(case, slices)
    for op, sliced, masked in zip(
        case.record.traced_ops, sliced_results, masked_results, strict=False
    ):
        present = _present(case, op.fields, cut_atoms)
        kept = masked.flatten() if present is None else masked[present.expand(op.shape)]
        if not _close(sliced.flatten(), kept):
            return op
    return None


def _recorded_results(case: VerificationCase, module: nn.Module, mode: Float64Mode) -> list[Tensor]:
    mode.recorded = []
    _forward(module.train(), case.inputs, mode)
    return [result.detach() for result in mode.recorded]


def _cut_atoms(case: VerificationCase, slices: Slices) -> Tensor:
    """Return the classes of atoms that are cut."""
    labels = case.record.labels
    cut_atoms: list[Tensor] = []
    for group in slices.groups:
        cut = group.cuts[0]
        assert cut.axis is not None
        is_cut = torch.ones(group.size, dtype=torch.bool)
        is_cut[slices.kept[group.name]] = False
        indices = cut.start + is_cut.nonzero().flatten() * cut.per_unit
        cut_atoms.append(labels.atoms.roots(labels.axes[cut.tensor, cut.axis])[indices])
    return torch.cat(cut_atoms)


def _present(case: VerificationCase, fields: Sequence[Field], cut_atoms: Tensor) -> Tensor | None:
    """Return where a tensor with these fields is present; None if all of it is."""
    masks = [~torch.isin(case.record.labels.atoms.roots(field), cut_atoms) for field in fields]
    if all(bool(mask.all()) for mask in masks):
        return None
    present = masks[0]
    for mask in masks[1:]:
        present = present & mask
    return present.clone()


def _scale(tensor: Tensor) -> float:
    if not tensor.numel():
        return 1.0
    return max(1.0, float(tensor.detach().double().nan_to_num().abs().max()))


def _close(left: Tensor | None, right: Tensor, rounding_error: float = 0.0) -> bool:
    """Return whether two tensors are equal up to the tolerance and the known rounding error."""
    if left is None or left.shape != right.shape:
        return False
    left, right = left.detach().double(), right.detach().double()
    atol = max(TOLERANCE * _scale(right), rounding_error)
    return torch.allclose(left, right, rtol=TOLERANCE, atol=atol, equal_nan=True)
