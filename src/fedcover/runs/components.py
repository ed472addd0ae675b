"""What an experiment's names stand for: functions of tables or of a user's own, the recipe, and the model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from fedcover import registry, rng
from fedcover.errors import FedcoverError, InvalidValue
from fedcover.models import MODELS
from fedcover.models.meta_device import NotBuildableOnMeta, build_on_meta_or_cpu, is_on_meta
from fedcover.models.norms import with_running_statistics
from fedcover.runs.checks import check_parameters, dtype_hint
from fedcover.runs.experiment import Experiment
from fedcover.server.contracts import checked_recipe
from fedcover.submodels import unit_groups
from fedcover.submodels.tracing import trace
from fedcover.training.recipes import RECIPES, mask_absent_labels
from fedcover.types import Model, Recipe, UnitGroup

EXAMPLE_ROWS = 4
"""Rows of the example on which a model is traced: of two, batch norm leaves hardly more than signs."""


def build(field: str, text: str, table: Any, *given: Any) -> Any:
    """What a specification makes of what it is given; a user's function may fail in any way."""
    make = look_up(field, text, table)
    try:
        return make(*given)
    except FedcoverError:
        raise
    except Exception as error:  # or it wants more memory than there is
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(f"{field} {text!r} cannot be built: {why}") from error


def look_up(field: str, text: str, table: Any) -> Any:
    """The function that a specification names, with its options bound."""
    return registry.look_up(field, registry.parse(field, text), table)


def build_model(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float32,
    known: Sequence[UnitGroup] | None = None,
) -> Model:
    """The experiment's model with the initial weights that belong to its seed; `dtype` is that of its inputs.

    `known` are the groups of a bare module that is built without values, and so cannot be traced.
    """
    with rng.seeded(experiment.seed, "init"):
        built = build("model", experiment.model, MODELS, shape, classes, experiment.norm)
    return build_recipe(experiment).model(
        as_model(built, shape, classes, dtype, cut=cuts(experiment), known=known)
    )


def build_meta_model(
    experiment: Experiment,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype,
    *,
    known: Sequence[UnitGroup] | None = None,
) -> Model:
    """The same model without values, for a device that never holds all of it; with them, if it cannot do without."""
    whole = partial(build_model, experiment, shape, classes, dtype, known)
    return build_on_meta_or_cpu(whole, f"model {experiment.model!r}")


def cuts(experiment: Experiment) -> bool:
    """Whether the experiment's policy needs to know how the model can be cut."""
    return experiment.policy != "full"


def as_model(
    built: Model | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype,
    *,
    cut: bool = True,
    known: Sequence[UnitGroup] | None = None,
) -> Model:
    """A model whose groups are known: a bare module's are found by tracing, or `known` where it has no values.

    Of a traced module all weights may be pruned but those of the first convolution and of the last layer. A module that
    cannot be traced has no units where none are to be `cut`; else it is refused.
    """
    module = built.module if isinstance(built, Model) else built
    if not isinstance(module, nn.Module):
        raise InvalidValue(
            f"model must be an nn.Module or a fedcover Model; got {type(built).__name__}"
        )
    check_parameters(module)
    module = with_running_statistics(module)
    params = dict(module.named_parameters())
    if isinstance(built, Model):
        return replace(
            built, module=module, groups=unit_groups.separate_buffers(built.groups, params)
        )
    if is_on_meta(module):
        if known is None:
            raise NotBuildableOnMeta(
                "its groups are found by tracing, which computes with its values"
            )
        return _traced(module, known, classes)
    draw, size, floats = (
        rng.generator(0, "example"),
        (EXAMPLE_ROWS, *shape),
        dtype.is_floating_point,
    )
    example = (
        torch.randn(size, generator=draw).to(dtype)
        if floats
        else torch.randint(classes, size, generator=draw)
    )
    try:
        found = trace(module, example)
    except InvalidValue as error:
        if cut:
            raise InvalidValue(f"{error}{dtype_hint(module, dtype)}") from error
        found = ()
    return _traced(module, found, classes)


def _traced(module: nn.Module, declared: Sequence[UnitGroup], classes: int) -> Model:
    """A bare module with its groups: which of its weights may be pruned, and which classify."""
    params = dict(module.named_parameters())
    along = {(each.tensor, each.axis) for group in declared for each in group.cuts}
    weights = {name: p for name, p in params.items() if p.ndim > 1}
    prunable = tuple(
        n for n, p in weights.items() if (n, 0) in along and (p.ndim == 2 or (n, 1) in along)
    )
    classifier = tuple(
        name
        for name, p in params.items()
        if p.ndim
        and p.shape[0] == classes
        and (name, 0) not in along
        and isinstance(
            module.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.modules.conv._ConvNd
        )
    )
    return Model(module, unit_groups.separate_buffers(declared, params), prunable, classifier)


def build_recipe(experiment: Experiment) -> Recipe:
    """The experiment's local training, kept to the clients' own labels where that is asked for."""
    return _recipe(experiment.recipe, experiment.absent_labels, experiment.label_rows)


@cache  # runs that take their steps together must share the very functions
def _recipe(name: str, absent: str, rows: bool) -> Recipe:
    recipe = build("recipe", name, RECIPES)
    if not isinstance(recipe, Recipe):
        raise InvalidValue(
            f"recipe {name!r} must make a fedcover Recipe; got {type(recipe).__name__}"
        )
    return mask_absent_labels(checked_recipe(name, recipe), absent=absent, rows=rows)
