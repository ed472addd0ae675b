"""Functions on trees: tuples and dicts, nested at will, with tensors as leaves.

A recipe's `carry` is such a tree. Dicts are visited in the order of their sorted names, so two
trees with the same names match whatever the insertion order of their dicts.
"""

from collections.abc import Callable, Hashable

from torch import Tensor

from fedcover.training.engines.unsupported import UnsupportedByEngine
from fedcover.types import Carry

TreeSpec = Hashable
"""The structure of a tree: its names, and the shape and dtype of each leaf."""


def tree_leaves(tree: Carry) -> list[Tensor]:
    """Return the tensors of a tree in visiting order.

    >>> import torch
    >>> tree = ({"b": torch.tensor(2), "a": torch.tensor(1)}, torch.tensor(3))
    >>> [leaf.item() for leaf in tree_leaves(tree)]
    [1, 2, 3]
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        children = [tree[name] for name in sorted(tree, key=str)]
    elif isinstance(tree, tuple):
        children = list(tree)
    else:
        raise UnsupportedByEngine(f"the recipe remembers a {type(tree).__name__}, not only tensors")
    return [leaf for child in children for leaf in tree_leaves(child)]


def tree_spec(tree: Carry) -> TreeSpec:
    """Return the structure of a tree; equal for trees whose leaves can be stacked."""
    if isinstance(tree, dict):
        return tuple((name, tree_spec(tree[name])) for name in sorted(tree, key=str))
    if isinstance(tree, tuple):
        return tuple(tree_spec(child) for child in tree)
    return tuple(tree_leaves(tree)[0].shape), tree.dtype


def tree_map(function: Callable[..., Tensor], first: Carry, *others: Carry) -> Carry:
    """Apply a function to the corresponding leaves of equal trees, in visiting order."""
    if isinstance(first, Tensor):
        return function(first, *others)
    if isinstance(first, tuple):
        groups = zip(first, *others, strict=True)
        return tuple(tree_map(function, *children) for children in groups)
    mapped = {}
    for name in sorted(first, key=str):
        children = [first[name], *(other[name] for other in others)]
        mapped[name] = tree_map(function, *children)
    return {name: mapped[name] for name in first}


def tree_copy_(target: Carry, source: Carry) -> None:
    """Copy the leaves of one tree into those of another of the same structure."""
    if tree_spec(target) != tree_spec(source):
        raise UnsupportedByEngine(
            "what the recipe remembers does not keep its names, shapes and types"
        )
    for old, new in zip(tree_leaves(target), tree_leaves(source), strict=True):
        old.copy_(new)
