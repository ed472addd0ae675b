"""What recipes remember from step to step: trees whose leaves are tensors."""

from collections.abc import Hashable

import torch
from torch import Tensor

from fedcover.tensors import tree_leaves, tree_leaves_with_path, tree_map, tree_structure
from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Carry

CarrySpec = frozenset[tuple[Hashable, tuple[int, ...], torch.dtype]]
"""The place, shape and dtype of each tensor of a carry."""


def plain_carry(carry: Carry) -> Carry:
    """Replace dicts of a class of their own, such as `FlatParams`, by plain dicts.

    Trees know plain dicts only, and what steps compute from them is plain, too.
    """
    return tree_map(lambda node: dict(node) if isinstance(node, dict) else node, carry)


def carry_spec(carry: Carry) -> CarrySpec:
    """Return the structure of a carry; equal for those whose tensors can be stacked.

    The order of a dict does not count.

    >>> a, b = torch.tensor(1), torch.tensor(2)
    >>> carry_spec({"a": a, "b": b}) == carry_spec({"b": b, "a": a})
    True
    """
    places = []
    for path, leaf in tree_leaves_with_path(carry):
        if not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            raise UnsupportedByEngine(f"the recipe remembers a {kind}, not only tensors")
        places.append((path, tuple(leaf.shape), leaf.dtype))
    return frozenset(places)


def copy_carry_(target: Carry, source: Carry) -> None:
    """Copy the tensors of a carry into those of another with the same structure."""
    try:
        values = tree_structure(target).flatten_up_to(source)
    except ValueError as error:  # other names, or more or fewer parts
        raise _changed_structure() from error
    pairs = list(zip(tree_leaves(target), values, strict=True))
    if not all(_are_alike(old, new) for old, new in pairs):
        raise _changed_structure()
    for old, new in pairs:
        old.copy_(new)


def _are_alike(old: Tensor, new: object) -> bool:
    return isinstance(new, Tensor) and new.shape == old.shape and new.dtype == old.dtype


def _changed_structure() -> UnsupportedByEngine:
    return UnsupportedByEngine(
        "what the recipe remembers does not keep its names, shapes and types"
    )
