"""The length of a client's update, and how to limit it."""

import torch

from fedcover.tensors import norm, zeros
from fedcover.types import Params, Reduction


def change(old: Params, trained: Reduction, values: Params) -> Params:
    """Return how a client moved the entries that it trained: in full shape, zero elsewhere.

    Args:
        old: the global model before the round.
        trained: the entries that the client trained.
        values: the client's parameters after training, in the shapes of its part.

    Returns:
        The differences, in float64.

    >>> from fedcover.submodels.reductions import Masks
    >>> trained = Masks({"w": torch.tensor([True, False])})
    >>> change({"w": torch.ones(2)}, trained, {"w": torch.tensor([1.5, 9.0])})["w"].tolist()
    [0.5, 0.0]
    """
    difference = zeros(old, torch.float64)
    trained.add_into(difference, values, 1.0)
    trained.add_into(difference, trained.extract({name: old[name] for name in values}), -1.0)
    return difference


def clip_update(old: Params, trained: Reduction, values: Params, limit: float) -> Params:
    """Scale a client's update down to length `limit`; return shorter updates bit for bit.

    >>> from fedcover.submodels.reductions import Masks
    >>> old, values = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> clip_update(old, Masks({}), values, 1.0)["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    difference = change(old, trained, values)
    length = norm(difference.values())
    if length <= limit:
        return values
    scale = limit / length
    clipped = {name: old[name].double() + tensor * scale for name, tensor in difference.items()}
    part = trained.extract({name: clipped[name] for name in values})
    return {name: tensor.to(values[name].dtype) for name, tensor in part.items()}
