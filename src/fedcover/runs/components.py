"""Build what an experiment names: functions from tables or by import path, recipe and model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedcover import registry, rng
from fedcover.errors import FedcoverError, InvalidValue
from fedcover.models import MODELS
from fedcover.models.meta_device import NotBuildableOnMeta, build_on_meta_or_cpu, is_on_meta
from fedcover.models.norms import with_running_statistics
from fedcover.runs.checks import check_parameters
from fedcover.runs.experiment import Experiment
from fedcover.runs.model_trial import dtype_hint
from fedcover.server.contracts import checked_recipe
from fedcover.submodels import unit_groups
from fedcover.submodels.tracing import trace
from fedcover.training.recipes import RECIPES, mask_absent_labels
from fedcover.types import Model, Recipe, UnitGroup

EXAMPLE_ROWS = 4
"""Rows of the example that a model is traced with; with two, batch norm leaves only signs."""


def build(field: str, text: str, table: Any, *arguments: Any) -> Any:
    """Call what a specification names; a user's function may fail in any way."""
    make = look_up_spec(field, text, table)
    try:
        return make(*arguments)
    except FedcoverError:
        raise
    except Exception as error:  # also if there is not enough memory
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(f"{field} {text!r} cannot be built: {cause}") from error


def look_up_spec(field: str, text: str, table: Any) -> Any:
    """Return the function that a specification names, with its options bound."""
    return registry.look_up(field, registry.parse(field, text), table)


# ── the model ───────────────────────────────────────────────────────────────────────────────────


def build_model(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float32,
    known_groups: Sequence[UnitGroup] | None = None,
) -> Model:
    """Build the experiment's model with the initial weights of its seed.

    `shape` and `dtype` are those of one input. `known_groups` are for a bare module on the meta
    device, which cannot be traced.
    """
    with rng.seeded(experiment.seed, "init"):
        built = build("model", experiment.model, MODELS, shape, classes, experiment.norm)
    model = as_model(
        built,
        shape,
        classes,
        dtype,
        needs_groups=uses_submodels(experiment),
        known_groups=known_groups,
    )
    return build_recipe(experiment).model(model)


def build_meta_model(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype,
    *,
    known_groups: Sequence[UnitGroup] | None = None,
) -> Model:
    """Build the same model without values, for a device that never holds all of it.

    A model that cannot be built without values gets them.
    """
    builder = partial(build_model, experiment, shape, classes, dtype, known_groups)
    return build_on_meta_or_cpu(builder, f"model {experiment.model!r}")


def uses_submodels(experiment: Experiment) -> bool:
    """Return whether the experiment's policy gives clients sub-models."""
    return experiment.policy != "full"


def as_model(
    built: Model | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype,
    *,
    needs_groups: bool = True,
    known_groups: Sequence[UnitGroup] | None = None,
) -> Model:
    """Return a model with unit groups; those of a bare module are found by tracing.

    In a traced module all weights may be pruned, except those of the first convolution and of
    the last layer. If tracing fails, the model has no groups, and that is an error only with
    `needs_groups`. `known_groups` replace tracing for a module on the meta device.
    """
    module = built.module if isinstance(built, Model) else built
    if not isinstance(module, nn.Module):
        raise InvalidValue(
            f"model must be an nn.Module or a fedcover Model; got {type(built).__name__}"
        )
    check_parameters(module)
    module = with_running_statistics(module)
    if isinstance(built, Model):
        params = dict(module.named_parameters())
        groups = unit_groups.separate_buffers(built.groups, params)
        return replace(built, module=module, groups=groups)
    if is_on_meta(module):
        if known_groups is None:
            raise NotBuildableOnMeta(
                "its groups are found by tracing, which computes with its values"
            )
        return _with_groups(module, known_groups, classes)
    traced_groups: Sequence[UnitGroup] = ()
    try:
        traced_groups = trace(module, _example(shape, classes, dtype))
    except InvalidValue as error:
        if needs_groups:
            raise InvalidValue(f"{error}{dtype_hint(module, dtype)}") from error
    return _with_groups(module, traced_groups, classes)


def _example(shape: tuple[int, ...], classes: int, dtype: torch.dtype) -> Tensor:
    """Return a random input to trace a model with."""
    generator = rng.generator(0, "example")
    size = (EXAMPLE_ROWS, *shape)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(classes, size, generator=generator)


def _with_groups(module: nn.Module, groups: Sequence[UnitGroup], classes: int) -> Model:
    """Return a bare module as a model, with the weights that may be pruned or that classify."""
    params = dict(module.named_parameters())
    cut_axes = {(cut.tensor, cut.axis) for group in groups for cut in group.cuts}
    prunable = []
    for name, p in params.items():
        outputs_cut = p.ndim > 1 and (name, 0) in cut_axes
        if outputs_cut and (p.ndim == 2 or (name, 1) in cut_axes):
            prunable.append(name)
    classifier = []
    for name, p in params.items():
        one_row_per_class = p.ndim > 0 and p.shape[0] == classes and (name, 0) not in cut_axes
        layer = module.get_submodule(name.rpartition(".")[0])
        if one_row_per_class and isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            classifier.append(name)
    return Model(
        module,
        unit_groups.separate_buffers(groups, params),
        tuple(prunable),
        tuple(classifier),
    )


# ── the recipe ──────────────────────────────────────────────────────────────────────────────────


def build_recipe(experiment: Experiment) -> Recipe:
    """Build the experiment's recipe, with absent labels masked as it asks for."""
    return _cached_recipe(experiment.recipe, experiment.absent_labels, experiment.label_rows)


@cache  # runs in lockstep must share the very same functions
def _cached_recipe(name: str, absent: str, rows: bool) -> Recipe:
    recipe = build("recipe", name, RECIPES)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(
            f"recipe {name!r} must make a fedcover Recipe; got {type(recipe).__name__}"
        )
    return mask_absent_labels(checked_recipe(name, recipe), absent=absent, rows=rows)
