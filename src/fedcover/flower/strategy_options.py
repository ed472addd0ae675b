"""Check and prepare what a user gives to `CoverageStrategy`."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.models import params_and_buffers
from fedcover.server.aggregation import WEIGHTS
from fedcover.submodels import unit_groups
from fedcover.types import Model, Params, PolicyFunction

MEASURES = ("width", "parameters")
"""What a capacity may be a share of."""

NEEDS_CALIBRATION = (
    "this model has norm layers whose statistics no client sends: "
    "give CoverageStrategy(calibration=...) some hundred inputs (a tensor, or an .npy file), "
    "on which the server computes them, or use group norms"
)


def prepare_model(model: object) -> Model:
    """Check the model and its unit groups, and give buffers groups of their own."""
    if not isinstance(model, Model):
        example = "fc.Model(module, fc.trace(module, example))"
        raise InvalidValue(
            f"model must be a fedcover Model, such as {example}; got {type(model).__name__}"
        )
    unit_groups.check_groups(model.groups, params_and_buffers(model.module))
    params = dict(model.module.named_parameters())
    return replace(model, groups=unit_groups.separate_buffers(model.groups, params))


def check_choices(weights: str, capacity: str, window: int, seed: int) -> None:
    """Check the options that have a fixed range of values."""
    if weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    if capacity not in MEASURES:
        raise unknown("capacity", capacity, MEASURES)
    for name, value, minimum in (("window", window, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < minimum:
            raise InvalidValue(
                f"{name} must be a whole number of at least {minimum}; got {value!r}"
            )


def load_calibration(calibration: Tensor | str | Path | None) -> Tensor | None:
    """Return the calibration inputs, read from an .npy file if a path is given."""
    if not isinstance(calibration, str | Path):
        return calibration
    try:
        return torch.from_numpy(np.load(calibration, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"calibration must be an .npy file of inputs; {str(calibration)!r}: {error}"
        ) from error


def name_of_policy(policy: str | PolicyFunction) -> str:
    """Return the policy as a user writes it, or the name of the user's own function."""
    if isinstance(policy, str):
        return policy
    return getattr(policy, "__qualname__", type(policy).__name__)


def settings_digest(policy_name: str, params: Params, **settings: Any) -> str:
    """Return a digest of what a checkpoint must have been made with."""
    shapes = {name: list(tensor.shape) for name, tensor in params.items()}
    content = json.dumps({"policy": policy_name, **settings, "shapes": shapes})
    return hashlib.sha256(content.encode()).hexdigest()[:16]
