"""Run a model on two samples before a run begins: it must fit the data, and return logits."""

import torch
from torch import Tensor, nn

from fedcover import rng
from fedcover.errors import InvalidValue
from fedcover.log import log
from fedcover.models.norms import use_batch_statistics
from fedcover.runs.checks import Names
from fedcover.runs.experiment import Experiment
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import Masks
from fedcover.tensors import clone
from fedcover.types import Model, Params, Recipe, Samples, Source

_CAST_METHODS = {"float64": "double", "float32": "float", "float16": "half", "bfloat16": "bfloat16"}


def check_outputs(
    experiment: Experiment, names: Names, model: Model, source: Source, recipe: Recipe
) -> None:
    """Run the model on two samples: it must accept the data and return one logit per label."""
    samples = Samples(source.test.x[:2].clone(), source.test.y[:2])
    logits = _run_trial(names, model, samples)
    expected = (len(samples), source.classes, *samples.y.shape[1:])
    actual = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    has_exits = isinstance(actual, tuple) and actual[1:] == expected
    if recipe.exits:
        if not has_exits:
            raise InvalidValue(
                f"recipe {experiment.recipe!r} needs a model with exits, such as depth_resnet; "
                f"got {actual}"
            )
    elif actual != expected:
        hint = " (exits need the recipe depthfl)" if has_exits else ""
        raise InvalidValue(
            f"model {names.model} must answer {len(samples)} samples with logits of shape "
            f"{expected}; got {actual}{hint}"
        )


def _run_trial(names: Names, model: Model, samples: Samples) -> object:
    """Return the output of a copy of the model, and check that it does not change its input."""
    version = samples.x._version
    trial = use_batch_statistics(submodel(model.module, Masks({}), {})).train()
    buffers = clone(dict(trial.named_buffers()))
    try:
        with torch.no_grad(), rng.seeded(0, "trial"):
            output = trial(samples.x)
    except Exception as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        hint = dtype_hint(model.module, samples.x.dtype)
        raise InvalidValue(
            f"model {names.model} cannot take data {names.data}: {cause}{hint}"
        ) from error
    _warn_of_changed_buffers(trial, buffers)
    if samples.x._version != version:
        raise InvalidValue(
            f"model {names.model} writes to its input, which is the data set: use no x.sub_() on it"
        )
    return output


def dtype_hint(module: nn.Module, data_dtype: torch.dtype) -> str:
    """Return a hint for a model that failed if its data has another floating type.

    >>> dtype_hint(nn.Linear(2, 2), torch.float64)
    '; the data is float64 and the parameters are float32: give module.double(), or x.float()'
    """
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if not data_dtype.is_floating_point or len(dtypes) != 1 or dtypes == {data_dtype}:
        return ""
    data_type = str(data_dtype).removeprefix("torch.")
    param_type = str(*dtypes).removeprefix("torch.")
    hint = f"; the data is {data_type} and the parameters are {param_type}"
    if not {data_type, param_type} <= _CAST_METHODS.keys():
        return hint
    hint += f": give module.{_CAST_METHODS[data_type]}(), or x.{_CAST_METHODS[param_type]}()"
    if data_type == "float32":
        hint += " in a Dataset made by hand (from_tensors and files make float32 of it)"
    return hint


def _warn_of_changed_buffers(trial: nn.Module, before: Params) -> None:
    """Warn of buffers that the model has changed.

    The trial model tracks no norm statistics, so those are not among them.
    """
    changed = [
        name
        for name, buffer in trial.named_buffers()
        if name not in before or not torch.equal(buffer, before[name])
    ]
    if changed:
        log.warning(
            "model: %s changes while the model computes; such buffers are not averaged: each "
            "client, and the global model, has the value that they began with",
            " and ".join(changed[:3]),
        )
