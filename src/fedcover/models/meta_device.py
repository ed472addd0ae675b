"""A model for a device that holds only a part of it: the shapes of all of it, built without its values.

Values come from the server: those of parameters and of running norm statistics. A model that keeps any others, or that
cannot be built without values, is `NotBuildableOnMeta`, and its device must build all of it before it takes its part.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from fedcover.errors import InvalidValue
from fedcover.log import log
from fedcover.types import Model

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class NotBuildableOnMeta(Exception):
    """Why a model cannot be built without its values."""


class _DrawDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether numbers are drawn for tensors that have values."""

    drew_values = False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute as always."""
        result = operation(*args, **(kwargs or {}))
        drawn = torch.Tag.nondeterministic_seeded in operation.tags
        self.drew_values |= drawn and isinstance(result, Tensor) and result.device.type != "meta"
        return result


def build_on_meta(build: Callable[[], Model]) -> Model:
    """The model that a function builds, without the values of its parameters; norm statistics are those of a new layer.

    >>> from fedcover.models import mlp
    >>> build_on_meta(lambda: mlp((1, 28, 28), 10, "batch")).module.hidden1.weight.device.type
    'meta'
    """
    draws = _DrawDetector()  # type: ignore[no-untyped-call]
    try:
        with torch.device("meta"), draws:
            built = build()
    except NotBuildableOnMeta:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise NotBuildableOnMeta(
            f"it looks at values while it is built ({type(error).__name__}: {why:.200})"
        ) from error
    if (
        draws.drew_values
    ):  # which would not be the same numbers, since those before it were not drawn
        raise NotBuildableOnMeta("it draws numbers of its own while it is built")
    for name, parameter in built.module.named_parameters():
        if parameter.device.type != "meta":
            raise NotBuildableOnMeta(f"its parameter {name} says itself on which device it is made")
    for path, layer in built.module.named_modules():
        _check_layer(path, layer)
    return built


def build_on_meta_or_cpu(build: Callable[[], Model], name: str) -> Model:
    """A model without values, or with them, and a line that says why, if it cannot do without."""
    try:
        return build_on_meta(build)
    except NotBuildableOnMeta as why:
        log.warning("this device builds all of %s before it takes its part: %s", name, why)
    built = build()
    if is_on_meta(built.module):
        raise InvalidValue(
            f"{name} must be built anew whenever it is asked for; got one that was built before"
        )
    return built


def is_on_meta(module: nn.Module) -> bool:
    """Whether a module's parameters have no values."""
    return any(p.device.type == "meta" for p in module.parameters())


def _check_layer(path: str, layer: nn.Module) -> None:
    """Refuse a layer that keeps values which are not sent, and give a norm layer its statistics."""
    statistics = isinstance(layer, _BatchNorm) and layer.momentum is not None
    for leaf, buffer in layer._buffers.items():
        if buffer is not None and not (statistics and leaf in _STATISTICS):
            raise NotBuildableOnMeta(
                f"its buffer {path}{'.' if path else ''}{leaf} is not among what a node is sent"
            )
    for name, value in vars(layer).items():
        if name not in ("_parameters", "_buffers", "_modules") and _holds_tensor(value):
            raise NotBuildableOnMeta(
                f"{path or 'it'} keeps a tensor in its attribute {name}, which is not what a node is sent"
            )
    if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        for leaf in _STATISTICS:
            like: Tensor = layer._buffers[leaf]  # type: ignore[assignment]
            made = torch.ones_like if leaf == "running_var" else torch.zeros_like
            layer._buffers[leaf] = made(like, device="cpu")


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(each) for each in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensor(each) for each in value)
    return isinstance(value, Tensor)
