"""What a run is refused for before it begins: data, models and recipes that would fail, or go wrong, later on."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcover import registry, rng
from fedcover.data.client_data import REMOTE_DATA_MESSAGE
from fedcover.errors import InvalidValue
from fedcover.log import log
from fedcover.models import Scaler
from fedcover.models.norms import has_batch_norm, use_batch_statistics
from fedcover.policies.prunefl import RECONFIGURE_EVERY
from fedcover.runs.experiment import Experiment
from fedcover.server.grid_noise import require_stream
from fedcover.server.privacy import Gaussian
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import Masks, parameters_at_width
from fedcover.types import Dataset, Engine, Model, Params, Recipe, Samples, Source

EVEN = 0.015
"""How much more of the parameters than of the width goes without saying: biases of the last layer, rounded widths."""


@dataclass(frozen=True)
class Names:
    """What to call the model and the data of a run in a sentence: as the experiment does, or as what was given."""

    model: str
    data: str


def display_names(experiment: Experiment, model: object, dataset: Dataset | None) -> Names:
    """The names of a run's model and data; what was given in Python has the name of its class, or its own.

    >>> display_names(Experiment(dataset="digits"), nn.Linear(2, 2), None)
    Names(model='Linear (given in Python)', data="'digits'")
    """
    if dataset is not None and not isinstance(dataset, Dataset):
        raise InvalidValue(
            "dataset must be a fedcover Dataset here, as from_tensors and from_file make it "
            f"(or name it in the experiment instead); got {type(dataset).__name__}"
        )
    module = model.module if isinstance(model, Model) else model
    return Names(
        model=repr(experiment.model)
        if module is None
        else f"{type(module).__name__} (given in Python)",
        data=repr(experiment.dataset) if dataset is None else f"{dataset.name!r} (given in Python)",
    )


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that cannot be cut or averaged."""
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(p):
            raise InvalidValue(
                f"model: {name} is lazy and has no shape yet; send a batch through the model first"
            )
        if p.is_complex() and isinstance(p, nn.Parameter):
            raise InvalidValue(f"model: parameters must be real numbers, but {name} is {p.dtype}")


def dtype_hint(module: nn.Module, data: torch.dtype) -> str:
    """What to say of a model that has failed on data which is of another floating type than its parameters.

    >>> dtype_hint(nn.Linear(2, 2), torch.float64)
    '; the data is float64 and the parameters are float32: give module.double(), or x.float()'
    """
    own = {p.dtype for p in module.parameters()}
    if not data.is_floating_point or len(own) != 1 or own == {data}:
        return ""
    has, wants = (str(each).removeprefix("torch.") for each in (data, *own))
    casts = {"float64": "double", "float32": "float", "float16": "half", "bfloat16": "bfloat16"}
    cure = (
        f": give module.{casts[has]}(), or x.{casts[wants]}()"
        if {has, wants} <= casts.keys()
        else ""
    )
    kept = (
        " in a Dataset made by hand (from_tensors and files make float32 of it)"
        if cure and has == "float32"
        else ""
    )
    return f"; the data is {has} and the parameters are {wants}{cure}{kept}"


def check_outputs(
    experiment: Experiment, names: Names, model: Model, source: Source, recipe: Recipe
) -> None:
    """Try the model on two samples: it must take the data, and say one logit for each label."""
    two = Samples(source.test.x[:2].clone(), source.test.y[:2])
    untouched = two.x._version
    trial = use_batch_statistics(submodel(model.module, Masks({}), {})).train()
    buffers = {name: buffer.clone() for name, buffer in trial.named_buffers()}
    try:
        with torch.no_grad(), rng.seeded(0, "trial"):
            logits = trial(two.x)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        hint = dtype_hint(model.module, two.x.dtype)
        raise InvalidValue(
            f"model {names.model} cannot take data {names.data}: {why}{hint}"
        ) from error
    _warn_of_changed_buffers(trial, buffers)
    if two.x._version != untouched:
        raise InvalidValue(
            f"model {names.model} writes to its input, which is the data set: use no x.sub_() on it"
        )
    wanted = (len(two), source.classes, *two.y.shape[1:])
    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if recipe.exits and len(got) == len(wanted) + 1 and got[1:] == wanted:
        return
    if recipe.exits:
        raise InvalidValue(
            f"recipe {experiment.recipe!r} needs a model with exits, such as depth_resnet; got {got}"
        )
    if got != wanted:
        raise InvalidValue(
            f"model {names.model} must answer {len(two)} samples with logits of shape {wanted}; got {got}"
            + (
                " (exits need the recipe depthfl)"
                if isinstance(got, tuple) and got[1:] == wanted
                else ""
            )
        )


def _warn_of_changed_buffers(trial: nn.Module, before: Params) -> None:
    """Say which buffers a model has changed; norm statistics are none here, as a trial keeps none."""
    changed = [
        name
        for name, b in trial.named_buffers()
        if name not in before or not torch.equal(b, before[name])
    ]
    if changed:
        log.warning(
            "model: %s changes while the model computes; such buffers are not averaged: each client, and the global "
            "model, has the value that they began with", " and ".join(changed[:3])
        )  # fmt: skip


def check_settings_apply(
    experiment: Experiment, names: Names, model: Model, recipe: Recipe
) -> None:
    """Refuse settings that would silently change nothing, or something else, with this model or recipe."""
    name, norm, normed = names.model, experiment.norm, has_batch_norm(model.module)
    if norm in ("tracked", "per-width") and not normed:
        raise InvalidValue(
            f"norm {norm!r} keeps statistics of batch norms, and model {name} has none: use 'batch'"
        )
    if norm == "group" and normed:
        raise InvalidValue(
            f"norm is 'group', but model {name} has batch norms: one of your own must be built without"
        )
    if experiment.scaler and not any(isinstance(layer, Scaler) for layer in model.module.modules()):
        raise InvalidValue(
            f"scaler needs a model with places for it (mlp, cnn, the ResNets; in one of your own "
            f"fedcover.models.Scaler('layer.weight') behind a layer), and model {name} has none"
        )
    if experiment.label_rows and not model.classifier:
        raise InvalidValue(
            f"label_rows needs a model whose last layer is known, and that of model {name} is not: name its tensors, "
            "fc.Model(module, groups, classifier=('last.weight', 'last.bias'))"
        )
    policy = registry.parse("policy", experiment.policy)
    if experiment.capacity == "width" and policy.name not in ("full", "magnitude", "prunefl"):
        _warn_of_uncut_parts(experiment, names, model)
    if policy.name == "prunefl":
        _check_prunefl(policy, registry.parse("recipe", experiment.recipe), recipe)


def _warn_of_uncut_parts(experiment: Experiment, names: Names, model: Model) -> None:
    """Say once what devices hold of the parameters, where that is more than their width: parts may not be cuttable."""
    params = dict(model.module.named_parameters())
    whole = sum(p.numel() for p in params.values())
    levels = experiment.scaled_fleet.levels if model.groups else ()
    held = {
        level: parameters_at_width(model.groups, params, level) / whole
        for level in levels
        if level < 1
    }
    more = [
        f"{100 * share:.1f} % at {level:g}"
        for level, share in sorted(held.items())
        if share > level + EVEN
    ]
    if more:
        log.warning(
            "fleet: capacity is a share of width, and parts of model %s cannot be cut, so a device holds more of its "
            "parameters: %s; with capacity = 'parameters' it is a share of these", names.model, ", ".join(more),
        )  # fmt: skip


def _check_prunefl(policy: registry.Spec, named: registry.Spec, recipe: Recipe) -> None:
    if "squared_gradient" not in recipe.measures:
        log.warning(
            "policy prunefl keeps its first masks: without recipe prunefl nobody measures what it chooses by"
        )
    every, measured = (each.options.get("every", RECONFIGURE_EVERY) for each in (policy, named))
    if named.name == "prunefl" and every != measured:
        raise InvalidValue(
            f"policy prunefl and recipe prunefl must have the same every; got {every} and {measured}"
        )


def check_trainable(model: Model) -> None:
    """Refuse parameters that their maker has frozen: all of them would be trained, and averaged."""
    frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
    if frozen:
        raise InvalidValue(
            f"model: every parameter is trained, but {frozen[0]} has requires_grad = False ({len(frozen)} such); make "
            "it a buffer (register_buffer), which is kept as it is"
        )


def check_privacy(
    experiment: Experiment, names: Names, privacy: object, model: Model, recipe: Recipe
) -> None:
    """Refuse what would carry clients' data past the noise: norm statistics, and what clients measure."""
    require_stream()
    if not isinstance(privacy, Gaussian):
        raise InvalidValue(
            f"privacy {experiment.privacy!r} must make a fedcover Gaussian; got {type(privacy).__name__}"
        )
    if privacy.delta * experiment.clients >= 1:
        raise InvalidValue(
            f"privacy: delta must be below 1 / clients ({1 / experiment.clients:.3g}), or it allows to publish one "
            f"client's data as it is; got {privacy.delta:g}"
        )
    if has_batch_norm(model.module):
        raise InvalidValue(
            f"privacy: batch norm of model {names.model} needs statistics of clients' data, which carry no "
            "noise; use norm = 'group', or a model without norm layers"
        )
    if recipe.measures:
        raise InvalidValue(
            f"privacy: what clients measure under recipe {experiment.recipe!r} carries no noise"
        )
    if recipe.chooses:
        raise InvalidValue(
            "privacy: with this recipe a client chooses what it trains, and that would show its data"
        )


def check_data_is_local(experiment: Experiment, engine: Engine | None = None) -> None:
    """Refuse to train in this process where the rows are on nodes, unless an engine reaches these."""
    if experiment.partition == "nodes" and not hasattr(engine, "holdings"):
        raise InvalidValue(REMOTE_DATA_MESSAGE)


def check_dataset(dataset: Dataset) -> None:
    """Refuse a data set, made by hand, whose parts do not go together."""
    train, test = dataset.train, dataset.test
    if test.x.shape[1:] != train.x.shape[1:]:
        wanted, got = tuple(train.x.shape[1:]), tuple(test.x.shape[1:])
        raise InvalidValue(f"test.x must have rows of the shape of train.x's, {wanted}; got {got}")
    if test.x.dtype != train.x.dtype:
        raise InvalidValue(
            f"test.x must have the type of train.x, {train.x.dtype}; got {test.x.dtype}"
        )
    for name, (x, y) in {"train": (train.x, train.y), "test": (test.x, test.y)}.items():
        if not len(x):
            raise InvalidValue(f"{name}.x must have rows; got none")
        if y.dtype != torch.int64:
            raise InvalidValue(f"{name}.y must be int64; got {y.dtype}")
        if len(y) != len(x):
            raise InvalidValue(
                f"{name}.y must have a label for each of the {len(x)} rows of {name}.x; got {len(y)}"
            )
        for extreme in (int(y.min()), int(y.max())):
            if not 0 <= extreme < dataset.classes:
                raise InvalidValue(
                    f"{name}.y must be labels 0 to {dataset.classes - 1}; got {extreme}"
                )
    if dataset.owner is not None and len(dataset.owner) != len(train.x):
        raise InvalidValue(
            f"owner must have an entry for each of the {len(train.x)} rows; got {len(dataset.owner)}"
        )
