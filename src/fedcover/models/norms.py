"""What happens to norm statistics: a batch's own while training, known ones while evaluating.

| norm        | statistics in training       | statistics in evaluation                                        |
|-------------|------------------------------|-----------------------------------------------------------------|
| `batch`     | the batch's, not kept        | computed on the calibration set for the very model evaluated    |
| `tracked`   | the batch's, running average | the running averages, averaged over the clients that cover them |
| `per-width` | the same, one set per width  | the set of that width; computed on the calibration set if none  |
| `group`     | each sample's own            | each sample's own                                               |
"""

from copy import deepcopy
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.errors import InvalidValue
from fedcover.types import Params

NORMS = ("batch", "tracked", "per-width", "group")
_RUNNING = ("running_mean", "running_var")
CALIBRATION_BATCH = 500


def statistics_key(norm: str, capacity: float) -> str | None:
    """Which set of running statistics a model of some capacity uses; None where none are kept.

    >>> statistics_key("tracked", 0.5), statistics_key("per-width", 0.5), statistics_key("batch", 0.5)
    ('all', '0.5', None)
    """
    return {"tracked": "all", "per-width": f"{capacity:.12g}"}.get(norm)


def running(module: nn.Module) -> Params:
    """The running statistics of a module's batch norms, by name."""
    return {
        f"{path}.{leaf}": getattr(layer, leaf).detach()
        for path, layer in _batch_norms(module)
        for leaf in _RUNNING
        if layer.track_running_stats
    }


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises by statistics over samples."""
    return bool(_batch_norms(module))


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Let batch norms neither read nor write running statistics (changes the module, returns it)."""
    for _, layer in _batch_norms(module):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        layer.track_running_stats = False
    return module


def with_running_statistics(module: nn.Module) -> nn.Module:
    """The module, or a copy of it whose batch norms all have room for statistics, which evaluation fills.

    Without any they would take those of the test batch, and what a model says of one sample would depend on the others.
    """
    if all(layer.running_mean is not None for _, layer in _batch_norms(module)):
        return module
    copy = deepcopy(module)
    for _, layer in _batch_norms(copy):
        if layer.running_mean is None:
            like = next(layer.parameters(recurse=False), torch.empty(0))
            layer.running_mean = torch.zeros(
                layer.num_features, device=like.device, dtype=like.dtype
            )
            layer.running_var = torch.ones(layer.num_features, device=like.device, dtype=like.dtype)
            layer.num_batches_tracked = torch.tensor(0, device=like.device)
            layer.track_running_stats = True
    return copy


@torch.no_grad()
def calibrate(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Give a module the statistics of the calibration inputs: plain averages over fixed batches."""
    layers = [layer for _, layer in _batch_norms(module)]
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    momenta = [layer.momentum for layer in layers]
    if layers:
        # equal batches: they count the same, so a short last one would count too much
        for number, batch in enumerate(
            torch.tensor_split(inputs, ceil(len(inputs) / CALIBRATION_BATCH))
        ):
            for layer in (
                layers
            ):  # a plain average; None would mean the same, but asks the device how many there were
                layer.momentum = 1.0 / (number + 1)
            try:
                module(batch)
            except ValueError as error:
                raise InvalidValue(
                    f"calibration: {len(batch)} rows are too few for the statistics of a norm layer; take more"
                ) from error
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    return module.eval()


def _batch_norms(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    return [
        (path, layer) for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)
    ]
