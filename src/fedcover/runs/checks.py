"""Checks before a run begins: data, models and recipes that would fail, or go wrong, later."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedcover import registry
from fedcover.data.client_data import REMOTE_DATA_MESSAGE
from fedcover.errors import InvalidValue
from fedcover.log import log
from fedcover.models import Scaler
from fedcover.models.norms import has_batch_norm
from fedcover.policies.prunefl import RECONFIGURE_EVERY
from fedcover.runs.experiment import Experiment
from fedcover.server.grid_noise import require_stream
from fedcover.server.privacy import Gaussian
from fedcover.submodels.reductions import parameters_at_width
from fedcover.training.engines import as_engine
from fedcover.types import Dataset, EngineFunction, Model, Recipe, Samples

EVEN = 0.015
"""How far the share of parameters may exceed the width without a warning.

Biases of the last layer and rounded widths explain as much.
"""


@dataclass(frozen=True)
class Names:
    """How error messages call the model and the data of a run."""

    model: str
    data: str


def display_names(experiment: Experiment, model: object, dataset: Dataset | None) -> Names:
    """Return how messages call the model and the data, including objects made in Python.

    >>> display_names(Experiment(dataset="digits"), nn.Linear(2, 2), None)
    Names(model='Linear (given in Python)', data="'digits'")
    """
    if dataset is not None and not isinstance(dataset, Dataset):
        raise InvalidValue(
            "dataset must be a fedcover Dataset here, as from_tensors and from_file make it "
            f"(or name it in the experiment instead); got {type(dataset).__name__}"
        )
    model_name, data_name = repr(experiment.model), repr(experiment.dataset)
    if model is not None:
        module = model.module if isinstance(model, Model) else model
        model_name = f"{type(module).__name__} (given in Python)"
    if dataset is not None:
        data_name = f"{dataset.name!r} (given in Python)"
    return Names(model_name, data_name)


# ── the data ────────────────────────────────────────────────────────────────────────────────────


def check_data_is_local(experiment: Experiment, engine: EngineFunction | None = None) -> None:
    """Raise if the rows are on nodes that the engine cannot reach."""
    reaches_nodes = engine is not None and as_engine(engine).client_info is not None
    if experiment.partition == "nodes" and not reaches_nodes:
        raise InvalidValue(REMOTE_DATA_MESSAGE)


def check_dataset(dataset: Dataset) -> None:
    """Check that the tensors of a data set fit together."""
    train, test = dataset.train, dataset.test
    if test.x.shape[1:] != train.x.shape[1:]:
        train_shape, test_shape = tuple(train.x.shape[1:]), tuple(test.x.shape[1:])
        raise InvalidValue(
            f"test.x must have rows of the shape of train.x's, {train_shape}; got {test_shape}"
        )
    if test.x.dtype != train.x.dtype:
        raise InvalidValue(
            f"test.x must have the type of train.x, {train.x.dtype}; got {test.x.dtype}"
        )
    _check_samples("train", train, dataset.classes)
    _check_samples("test", test, dataset.classes)
    if dataset.owner is not None and len(dataset.owner) != len(train.x):
        raise InvalidValue(
            f"owner must have an entry for each of the {len(train.x)} rows; "
            f"got {len(dataset.owner)}"
        )


def _check_samples(name: str, samples: Samples, classes: int) -> None:
    """Check that every row has a valid label."""
    x, y = samples.x, samples.y
    if not len(x):
        raise InvalidValue(f"{name}.x must have rows; got none")
    if y.dtype != torch.int64:
        raise InvalidValue(f"{name}.y must be int64; got {y.dtype}")
    if len(y) != len(x):
        raise InvalidValue(
            f"{name}.y must have a label for each of the {len(x)} rows of {name}.x; got {len(y)}"
        )
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < classes:
            raise InvalidValue(f"{name}.y must be labels 0 to {classes - 1}; got {label}")


# ── the model ───────────────────────────────────────────────────────────────────────────────────


def check_parameters(module: nn.Module) -> None:
    """Check that all parameters can be cut and averaged."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise InvalidValue(
                f"model: {name} is lazy and has no shape yet; send a batch through the model first"
            )
        if tensor.is_complex() and isinstance(tensor, nn.Parameter):
            raise InvalidValue(
                f"model: parameters must be real numbers, but {name} is {tensor.dtype}"
            )


def check_trainable(model: Model) -> None:
    """Check that no parameter is frozen: all of them would be trained and averaged."""
    frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
    if frozen:
        raise InvalidValue(
            f"model: every parameter is trained, but {frozen[0]} has requires_grad = False "
            f"({len(frozen)} such); make it a buffer (register_buffer), which is kept as it is"
        )


# ── settings that depend on each other ──────────────────────────────────────────────────────────


def check_settings_apply(
    experiment: Experiment, names: Names, model: Model, recipe: Recipe
) -> None:
    """Raise if a setting would have no effect, or another one, with this model or recipe."""
    _check_norm(experiment, names, model)
    layers = model.module.modules()
    if experiment.scaler and not any(isinstance(layer, Scaler) for layer in layers):
        raise InvalidValue(
            "scaler needs a model with places for it (mlp, cnn, the ResNets; in one of your own "
            "fedcover.models.Scaler('layer.weight') behind a layer), and model "
            f"{names.model} has none"
        )
    if experiment.label_rows and not model.classifier:
        raise InvalidValue(
            "label_rows needs a model whose last layer is known, and that of model "
            f"{names.model} is not: name its tensors, "
            "fc.Model(module, groups, classifier=('last.weight', 'last.bias'))"
        )
    policy = registry.parse("policy", experiment.policy)
    if experiment.capacity == "width" and policy.name not in ("full", "magnitude", "prunefl"):
        _warn_of_uncut_parts(experiment, names, model)
    if policy.name == "prunefl":
        _check_prunefl(policy, registry.parse("recipe", experiment.recipe), recipe)


def _check_norm(experiment: Experiment, names: Names, model: Model) -> None:
    norm, has_norms = experiment.norm, has_batch_norm(model.module)
    if norm in ("tracked", "per-width") and not has_norms:
        raise InvalidValue(
            f"norm {norm!r} keeps statistics of batch norms, and model {names.model} has none: "
            "use 'batch'"
        )
    if norm == "group" and has_norms:
        raise InvalidValue(
            f"norm is 'group', but model {names.model} has batch norms: "
            "one of your own must be built without"
        )


def _warn_of_uncut_parts(experiment: Experiment, names: Names, model: Model) -> None:
    """Warn if devices hold a larger share of the parameters than of the width.

    That happens when parts of the model cannot be cut.
    """
    if not model.groups:
        return
    params = dict(model.module.named_parameters())
    total = sum(p.numel() for p in params.values())
    larger_shares = []
    for level in sorted({level for level in experiment.scaled_fleet.levels if level < 1}):
        share = parameters_at_width(model.groups, params, level) / total
        if share > level + EVEN:
            larger_shares.append(f"{100 * share:.1f} % at {level:g}")
    if larger_shares:
        log.warning(
            "fleet: capacity is a share of width, and parts of model %s cannot be cut, so a "
            "device holds more of its parameters: %s; with capacity = 'parameters' it is a share "
            "of these",
            names.model,
            ", ".join(larger_shares),
        )


def _check_prunefl(policy: registry.Spec, recipe_spec: registry.Spec, recipe: Recipe) -> None:
    """Check that policy and recipe prunefl fit together."""
    if "squared_gradient" not in recipe.measures:
        log.warning(
            "policy prunefl keeps its first masks: without recipe prunefl nothing measures what "
            "it chooses by"
        )
    policy_every = policy.options.get("every", RECONFIGURE_EVERY)
    recipe_every = recipe_spec.options.get("every", RECONFIGURE_EVERY)
    if recipe_spec.name == "prunefl" and policy_every != recipe_every:
        raise InvalidValue(
            "policy prunefl and recipe prunefl must have the same every; "
            f"got {policy_every} and {recipe_every}"
        )


def check_privacy(
    experiment: Experiment, names: Names, privacy: object, model: Model, recipe: Recipe
) -> None:
    """Raise if anything would reveal clients' data without noise: statistics or measurements."""
    require_stream()
    if not isinstance(privacy, Gaussian):
        raise InvalidValue(
            f"privacy {experiment.privacy!r} must make a fedcover Gaussian; "
            f"got {type(privacy).__name__}"
        )
    if privacy.delta * experiment.clients >= 1:
        raise InvalidValue(
            f"privacy: delta must be below 1 / clients ({1 / experiment.clients:.3g}), or it "
            f"allows to publish one client's data as it is; got {privacy.delta:g}"
        )
    if has_batch_norm(model.module):
        raise InvalidValue(
            f"privacy: batch norm of model {names.model} needs statistics of clients' data, which "
            "carry no noise; use norm = 'group', or a model without norm layers"
        )
    if recipe.measures:
        raise InvalidValue(
            f"privacy: what clients measure under recipe {experiment.recipe!r} carries no noise"
        )
    if recipe.chooses:
        raise InvalidValue(
            "privacy: with this recipe a client chooses what it trains, "
            "and that would show its data"
        )
