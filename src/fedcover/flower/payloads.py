"""The tensors of a message as bytes: all of a client's in one payload, without what is cut.

A payload is a safetensors file, which `server/safetensors_codec.py` writes and reads.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.server.raw_arrays import ArraySpec, array_spec, as_array, decode_array
from fedcover.server.safetensors_codec import unpack_arrays
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.partial_params import PartialParams
from fedcover.submodels.reductions import Masks, Slices
from fedcover.tensors import to_device
from fedcover.types import Model, Params, Reduction


def encode_reduction(reduction: Reduction, model: Model) -> tuple[bytes, Reduction]:
    """Encode a reduction; also return it as the node will decode it.

    Both sides must use the decoded one to pack and unpack tensors.
    """
    if isinstance(reduction, Masks):
        prunable = {name: model.module.get_parameter(name) for name in model.prunable}
        unprunable = set(reduction.bits) - set(prunable)
        if unprunable:
            raise InvalidValue(
                f"a mask can travel only for prunable weights ({list(prunable)}); "
                f"got {sorted(unprunable)}"
            )
        full_masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prunable.items()}
        reduction = Masks({**full_masks, **reduction.bits})
    encoded = encode(reduction)
    return encoded, decode_reduction(encoded, model)


def decode_reduction(encoded: bytes, model: Model) -> Reduction:
    """Decode the reduction that `encode_reduction` wrote for the same model."""
    prunable = {name: model.module.get_parameter(name) for name in model.prunable}
    return decode(encoded, model.groups, prunable)


def unpack_sections(
    payload: bytes, expected: Mapping[str, Mapping[str, ArraySpec]]
) -> dict[str, Params]:
    """Decode the tensors of each section; types and shapes must be as expected."""
    names = {f"{section}/{name}" for section, specs in expected.items() for name in specs}
    arrays = unpack_arrays(payload)
    if names != set(arrays):
        differences = sorted(names ^ set(arrays))[:5]
        raise InvalidValue(f"the payload must hold other tensors; unlike here: {differences}")
    sections: dict[str, Params] = {}
    for section, specs in expected.items():
        sections[section] = {
            name: decode_array(name, arrays[f"{section}/{name}"], spec)
            for name, spec in specs.items()
        }
    return sections


def prefix_names(sections: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return tensors as arrays, named after their section and themselves."""
    return {
        f"{section}/{name}": as_array(tensor)
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    }


def gather_kept(reduction: Reduction, part: Mapping[str, Tensor]) -> Params:
    """Return a client's part with only the kept entries of masked tensors, in a row."""
    masks = reduction.gradient_mask()
    return {
        name: tensor[masks[name].to(tensor.device)] if name in masks else tensor
        for name, tensor in part.items()
    }


def expected_part(reduction: Reduction, full: Mapping[str, Tensor]) -> dict[str, ArraySpec]:
    """Describe what `gather_kept` returns for full tensors; only their shapes are read."""
    masks = reduction.gradient_mask()
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in full.items()}
    part = shapes if masks else reduction.extract(shapes)  # a mask cuts no shapes
    return {name: array_spec(tensor, masks.get(name)) for name, tensor in part.items()}


def scatter_kept(
    reduction: Reduction, part: Params, full: Mapping[str, Tensor], device: torch.device | str
) -> Params:
    """Undo `gather_kept`: return the part, or masked tensors in full with zeros elsewhere.

    Extracting the part from the result returns the same bits. Only the shapes of `full` are read.
    """
    if isinstance(reduction, Slices):
        return PartialParams(full, to_device(part, device), reduction)
    masks = reduction.gradient_mask()
    scattered = {}
    for name, tensor in part.items():
        if name in masks:
            tensor = _scatter(tensor, masks[name].cpu())
        scattered[name] = tensor
    return to_device(scattered, device)


def _scatter(entries: Tensor, mask: Tensor) -> Tensor:
    """Return a full tensor with the entries where the mask is true, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=entries.dtype).masked_scatter_(mask, entries)
