"""Turn arguments that a module passes by name into positional ones."""

from collections.abc import Mapping, Sequence
from typing import Any

CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
ATTENTION = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
)

LEADING_PARAMETERS: Mapping[str, Sequence[str]] = {
    "unflatten": ("input", "dim", "sizes"),
    "chunk": ("input", "chunks", "dim"),
    "split": ("input", "split_size_or_sections", "dim"),
    "split_with_sizes": ("input", "split_sizes", "dim"),
    "unbind": ("input", "dim"),
    "narrow": ("input", "dim", "start", "length"),
    "one_hot": ("input", "num_classes"),
    "group_norm": ("input", "num_groups"),
    "channel_shuffle": ("input", "groups"),
    "pixel_shuffle": ("input", "upscale_factor"),
    "layer_norm": ("input", "normalized_shape"),
    "rms_norm": ("input", "normalized_shape"),
    "multi_head_attention_forward": ATTENTION,
    **dict.fromkeys(("mean", "var", "std", "batch_norm"), ("input",)),
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), ("input",)),
    "_weight_norm": ("v", "g", "dim"),
    **{f"conv{n}d": CONVOLUTION for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": TRANSPOSED for n in (1, 2, 3)},
}
"""The leading parameters of functions, as far as constraints and masked operations read them."""

PARAMETER_ALIASES = {
    "input": ("self", "tensor"),
    "split_size_or_sections": ("split_size",),
}
"""Other names of the same parameter in torch."""


def normalize_arguments(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments, with leading named arguments made positional.

    >>> normalize_arguments("conv1d", ("x",), {"weight": "w", "groups": 2})
    (('x', 'w'), {'groups': 2})
    """
    positional, named = list(args), dict(kwargs)
    for parameter in LEADING_PARAMETERS.get(function, ())[len(positional) :]:
        aliases = (parameter, *PARAMETER_ALIASES.get(parameter, ()))
        name = next((alias for alias in aliases if alias in named), None)
        if name is None:
            break
        positional.append(named.pop(name))
    return tuple(positional), named
