"""Norm statistics: the batch's in training, fixed ones in evaluation.

| norm        | in training                  | in evaluation                                     |
|-------------|------------------------------|---------------------------------------------------|
| `batch`     | the batch's, not kept        | computed on the calibration set for this model    |
| `tracked`   | the batch's, running average | running means, averaged over the covering clients |
| `per-width` | the same, one set per width  | the set of that width, or as with `batch` if none |
| `group`     | each sample's own            | each sample's own                                 |

Tracked ones are averaged in `server.round`; `server.evaluation` calls `calibrate`.
"""

from copy import deepcopy
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.errors import InvalidValue
from fedcover.types import Params

NORMS = ("batch", "tracked", "per-width", "group")
_RUNNING = ("running_mean", "running_var")
CALIBRATION_BATCH = 500


def statistics_key(norm: str, capacity: float) -> str | None:
    """Return the name of the running statistics for a capacity; None if there are none.

    >>> [statistics_key(norm, 0.5) for norm in ("tracked", "per-width", "batch")]
    ['all', '0.5', None]
    """
    return {"tracked": "all", "per-width": f"{capacity:.12g}"}.get(norm)


def running_statistics(module: nn.Module) -> Params:
    """Return the running statistics of a module's batch norms by name."""
    return {
        f"{path}.{leaf}": getattr(layer, leaf).detach()
        for path, layer in _batch_norms(module)
        for leaf in _RUNNING
        if layer.track_running_stats
    }


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a module normalises by statistics over samples."""
    return bool(_batch_norms(module))


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Let batch norms neither read nor write running statistics; changes and returns the module."""
    for _, layer in _batch_norms(module):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        layer.track_running_stats = False
    return module


def with_running_statistics(module: nn.Module) -> nn.Module:
    """Return a module whose batch norms all have buffers for running statistics.

    This is the module itself, or a copy if some buffers are missing. Evaluation fills them. Without
    them, batch norms would use the statistics of the test batch, and the prediction for one sample
    would depend on the others.
    """
    if all(layer.running_mean is not None for _, layer in _batch_norms(module)):
        return module
    copy = deepcopy(module)
    for _, layer in _batch_norms(copy):
        if layer.running_mean is None:
            like = next(layer.parameters(recurse=False), torch.empty(0))
            options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
            layer.running_mean = torch.zeros(layer.num_features, **options)
            layer.running_var = torch.ones(layer.num_features, **options)
            layer.num_batches_tracked = torch.tensor(0, device=like.device)
            layer.track_running_stats = True
    return copy


@torch.no_grad()
def calibrate(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Set the norm statistics to averages over batches of calibration inputs."""
    layers = [layer for _, layer in _batch_norms(module)]
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    momenta = [layer.momentum for layer in layers]
    if layers:
        # Batches of equal size: all count the same, so a short last one would count too much.
        batches = torch.tensor_split(inputs, ceil(len(inputs) / CALIBRATION_BATCH))
        for number, batch in enumerate(batches):
            for layer in layers:
                # A plain average. None would do the same, but reads a counter from the device.
                layer.momentum = 1.0 / (number + 1)
            try:
                module(batch)
            except ValueError as error:
                raise InvalidValue(
                    f"calibration: {len(batch)} rows are too few for the statistics of a norm "
                    "layer; take more"
                ) from error
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return module.eval()


def _batch_norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [
        (path, layer) for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)
    ]
