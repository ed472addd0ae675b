"""Build models without values, for devices that hold only a part of them.

The server sends the values of parameters and running norm statistics. A model that stores other
values, or cannot be built without values, raises `NotBuildableOnMeta`. Its device must then build
the whole model before it takes its part.
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
    """Raised for a model that cannot be built without values."""


class _DrawDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record whether random numbers are drawn for tensors that have values."""

    drew_values = False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation unchanged."""
        result = operation(*args, **(kwargs or {}))
        is_draw = torch.Tag.nondeterministic_seeded in operation.tags
        has_values = isinstance(result, Tensor) and result.device.type != "meta"
        self.drew_values |= is_draw and has_values
        return result


def build_on_meta(build: Callable[[], Model]) -> Model:
    """Build a model without the values of its parameters.

    Norm statistics have the values of a new layer.

    Args:
        build: The function that builds the model.

    Returns:
        The model, with parameters on the `meta` device.

    Raises:
        NotBuildableOnMeta: If the model needs or stores other values.

    >>> from fedcover.models import mlp
    >>> build_on_meta(lambda: mlp((1, 28, 28), 10, "batch")).module.hidden1.weight.device.type
    'meta'
    """
    draws = _DrawDetector()  # type: ignore[no-untyped-call]
    try:
        with torch.device("meta"), draws:
            model = build()
    except NotBuildableOnMeta:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise NotBuildableOnMeta(
            f"it looks at values while it is built ({type(error).__name__}: {reason:.200})"
        ) from error
    # Draws on meta consume no random numbers, so later draws of values would differ.
    if draws.drew_values:
        raise NotBuildableOnMeta("it draws numbers of its own while it is built")
    for name, parameter in model.module.named_parameters():
        if parameter.device.type != "meta":
            raise NotBuildableOnMeta(
                f"its parameter {name} fixes the device on which it is created"
            )
    for path, layer in model.module.named_modules():
        _check_layer(path, layer)
    return model


def build_on_meta_or_cpu(build: Callable[[], Model], name: str) -> Model:
    """Build a model without values, or with values and a warning if it needs them."""
    try:
        return build_on_meta(build)
    except NotBuildableOnMeta as error:
        log.warning("this device builds all of %s before it takes its part: %s", name, error)
    model = build()
    if is_on_meta(model.module):
        raise InvalidValue(
            f"{name} must be created anew in every call; got one that was built before"
        )
    return model


def is_on_meta(module: nn.Module) -> bool:
    """Return whether any parameter of a module has no values."""
    return any(p.device.type == "meta" for p in module.parameters())


def _check_layer(path: str, layer: nn.Module) -> None:
    """Reject a layer that stores values the server does not send; fill in norm statistics."""
    sends_statistics = isinstance(layer, _BatchNorm) and layer.momentum is not None
    for leaf, buffer in layer._buffers.items():
        if buffer is not None and not (sends_statistics and leaf in _STATISTICS):
            raise NotBuildableOnMeta(
                f"its buffer {path}{'.' if path else ''}{leaf} is not sent to nodes"
            )
    for name, value in vars(layer).items():
        if name not in ("_parameters", "_buffers", "_modules") and _holds_tensor(value):
            raise NotBuildableOnMeta(
                f"{path or 'it'} keeps a tensor in its attribute {name}, which is not sent to nodes"
            )
    if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
        for leaf in _STATISTICS:
            statistic = layer._buffers[leaf]
            assert statistic is not None
            initialise = torch.ones_like if leaf == "running_var" else torch.zeros_like
            layer._buffers[leaf] = initialise(statistic, device="cpu")


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, Tensor)
