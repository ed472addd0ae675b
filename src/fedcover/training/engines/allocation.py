"""Allocate step tensors for a signature, and build the step that trains on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from fedcover.tensors import tree_map, unflatten
from fedcover.training.engines import stacked_layers
from fedcover.training.engines.client_inputs import ClientInputs, StepSignature
from fedcover.training.engines.sgd_step import FunctionalForward, SGDStep, observes_gradients
from fedcover.training.engines.stacked_functions import from_taps, to_taps
from fedcover.training.engines.step_tensors import StepTensors
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.training.engines.workspace import StepWorkspace
from fedcover.training.local_sgd import client_module
from fedcover.types import Carry, Params


def allocate_workspace(
    signature: StepSignature, like: ClientInputs, stack_size: int | None, *, bf16: bool, fused: bool
) -> StepWorkspace:
    """Allocate step tensors, all zero, on a client's device.

    Args:
        signature: Which clients will train here.
        like: One of these clients.
        stack_size: How many clients will train at once; None for one unstacked client.
        bf16: Whether steps compute in bf16.
        fused: Whether one kernel updates all parameters.
    """
    module = client_module(like.job.assignment)
    stacked = stack_size is not None
    stacked_kernels = stacked and stacked_layers.uses_stacked_kernels(
        module, like.device, signature.dtype
    )
    # cuDNN wants channels last, and would otherwise transpose every tensor in every step
    is_image = len(signature.sample) == 3
    channels_last = not stacked and like.device.type == "cuda" and is_image
    allocator = _Allocator(signature, like, stack_size, stacked_kernels, channels_last)
    params, flat_params = allocator.params()
    step = SGDStep(
        signature.recipe,
        signature.local,
        _functional_forward(module),
        stacked,
        channels_last,
        bf16=bf16 and stacked,
        fused=fused,
        cast_params=_autocast_params(module) if bf16 and not stacked else (),
        stacked_kernels=stacked_kernels,
    )
    tensors = allocator.step_tensors(params, module)
    return StepWorkspace(signature, stack_size, module, step, tensors, flat_params)


@dataclass(frozen=True, slots=True)
class _Allocator:
    """Allocates the tensors of one `StepWorkspace`."""

    signature: StepSignature
    like: ClientInputs
    stack_size: int | None
    stacked_kernels: bool
    channels_last: bool

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor, with a leading axis for stacked clients."""
        clients = () if self.stack_size is None else (self.stack_size,)
        return torch.zeros(
            (*clients, *shape), dtype=dtype or self.signature.dtype, device=self.like.device
        )

    def params(self) -> tuple[Params, Tensor | None]:
        """Allocate the parameters; those of an unstacked client are views of one flat tensor."""
        shapes = self.signature.param_shapes
        if self.stack_size is not None:
            return {name: self._weight(shape) for name, shape in shapes}, None
        flat_params = self.zeros(sum(prod(shape) for _, shape in shapes))
        return unflatten(flat_params, shapes, self.channels_last), flat_params

    def _weight(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate a weight; that of a convolution in the memory layout of our kernels."""
        weight = self.zeros(*shape)
        if self.stacked_kernels and weight.ndim == 5:
            return from_taps(to_taps(weight).contiguous())
        return weight

    def carry(self) -> Carry:
        """Allocate what the recipe remembers."""
        return tree_map(lambda leaf: self.zeros(*leaf.shape, dtype=leaf.dtype), self.like.carry)

    def buffers(self, module: nn.Module) -> Params:
        """Allocate the buffers of stacked clients."""
        if not self.stack_size:
            return {}
        return {
            name: self.zeros(*buffer.shape, dtype=buffer.dtype)
            for name, buffer in module.named_buffers()
        }

    def samples(self, values: Tensor) -> Tensor:
        """Allocate space for the rows of a client's inputs or labels."""
        return self.zeros(self.signature.rows, *values.shape[1:], dtype=values.dtype)

    def step_tensors(self, params: Params, module: nn.Module) -> StepTensors:
        """Allocate all that goes with the parameters."""
        signature, samples = self.signature, self.like.shard.samples
        steps_per_epoch = -(-signature.rows // signature.local.batch_size)
        max_steps = signature.local.epochs * steps_per_epoch
        return StepTensors(
            params=params,
            velocity=self.params()[0],
            masks={name: torch.zeros_like(params[name]) for name in signature.masked},
            buffers=self.buffers(module),
            carry=self.carry(),
            observed=self.carry() if observes_gradients(signature.recipe) else (),
            x=self.samples(samples.x),
            y=self.samples(samples.y),
            lr=torch.zeros((), dtype=signature.dtype, device=self.like.device),
            step=self.zeros(dtype=torch.int64),
            losses_T=self.zeros(max_steps).movedim(-1, 0).contiguous(),
        )


def _autocast_params(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that autocast casts: those of products and convolutions."""
    names = []
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, _ConvNd)):
            parameters = layer.named_parameters(recurse=False)
            names += [f"{path}.{name}".lstrip(".") for name, _ in parameters]
    return tuple(names)


def _functional_forward(module: nn.Module) -> FunctionalForward:
    """Return a module as a function of its buffers, its parameters and a batch of inputs."""

    def functional_forward(
        buffers: Mapping[str, Tensor], values: Mapping[str, Tensor], x: Tensor
    ) -> Tensor:
        state = {**buffers, **values}
        logits: Tensor = functional_call(module, state, (x,))
        # if the module rebinds a buffer, `functional_call` puts the new tensor into `state`
        if any(state[name] is not buffer for name, buffer in buffers.items()):
            raise UnsupportedByEngine(
                "the model replaces its buffers by new tensors, which a replayed step would miss"
            )
        return logits

    return functional_forward
