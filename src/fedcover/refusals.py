"""What a run is refused for before it begins: models and recipes that would fail, or be trained wrongly, later on."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcover import rng
from fedcover.errors import InvalidValue
from fedcover.experiment import Experiment
from fedcover.norms import has_batch_norm, on_batch_statistics
from fedcover.privacy import Gaussian, require_accountant
from fedcover.reduction import Masks
from fedcover.submodel import submodel
from fedcover.types import Model, Recipe, Samples, Source


def check_parameters(module: nn.Module) -> None:
    """Refuse parameters that cannot be cut or averaged."""
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(p):
            raise InvalidValue(f"model: {name} is lazy and has no shape yet; send a batch through the model first")
        if p.is_complex() and isinstance(p, nn.Parameter):
            raise InvalidValue(f"model: parameters must be real numbers, but {name} is {p.dtype}")


def check_outputs(experiment: Experiment, model: Model, source: Source, recipe: Recipe) -> None:
    """Try the model on two samples: it must take the data, and say one logit for each label."""
    two = Samples(source.test.x[:2].clone(), source.test.y[:2])
    untouched = two.x._version
    trial = on_batch_statistics(submodel(model.module, Masks({}), {})).train()
    try:
        with torch.no_grad(), rng.seeded(0, "trial"):
            logits = trial(two.x)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValue(f"model {experiment.model!r} cannot take data {experiment.dataset!r}: {why}") from error
    if two.x._version != untouched:
        raise InvalidValue(
            f"model {experiment.model!r} writes to its input, which is the data set: use no x.sub_() on it"
        )
    wanted = (len(two), source.classes, *two.y.shape[1:])
    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if recipe.exits and len(got) == len(wanted) + 1 and got[1:] == wanted:
        return
    if recipe.exits:
        raise InvalidValue(f"recipe {experiment.recipe!r} needs a model with exits, such as depth_resnet; got {got}")
    if got != wanted:
        raise InvalidValue(
            f"model {experiment.model!r} must answer {len(two)} samples with logits of shape {wanted}; got {got}"
            + (" (exits need the recipe depthfl)" if isinstance(got, tuple) and got[1:] == wanted else "")
        )


def check_trainable(model: Model) -> None:
    """Refuse parameters that their maker has frozen: all of them would be trained, and averaged."""
    frozen = [name for name, p in model.module.named_parameters() if not p.requires_grad]
    if frozen:
        raise InvalidValue(
            f"model: every parameter is trained, but {frozen[0]} has requires_grad = False ({len(frozen)} such); make "
            "it a buffer (register_buffer), which is kept as it is"
        )


def check_private(experiment: Experiment, privacy: object, model: Model, recipe: Recipe) -> None:
    """Refuse what would carry clients' data past the noise: norm statistics, and what clients measure."""
    require_accountant()
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
            f"privacy: batch norm of model {experiment.model!r} needs statistics of clients' data, which carry no "
            "noise; use norm = 'group', or a model without norm layers"
        )
    if recipe.measures:
        raise InvalidValue(f"privacy: what clients measure under recipe {experiment.recipe!r} carries no noise")
    if recipe.chooses:
        raise InvalidValue("privacy: with this recipe a client chooses what it trains, and that would show its data")
