"""Recipes: what a local training step computes. Each file implements one published method.

A recipe is a `Recipe`: a loss and optional hooks. To add one, write a function that returns a
`Recipe` and add it to `RECIPES`.
"""

from collections.abc import Callable

from fedcover.training.recipes.depthfl import depthfl
from fedcover.training.recipes.fedmask import fedmask
from fedcover.training.recipes.fedprox import plain, prox
from fedcover.training.recipes.fiarse import fiarse
from fedcover.training.recipes.fjord import fjord
from fedcover.training.recipes.hermes import hermes
from fedcover.training.recipes.label_masking import mask_absent_labels as mask_absent_labels
from fedcover.training.recipes.prunefl import prunefl
from fedcover.types import Recipe

RECIPES: dict[str, Callable[..., Recipe]] = {
    "plain": plain,
    "prox": prox,
    "fjord": fjord,
    "prunefl": prunefl,
    "hermes": hermes,
    "fedmask": fedmask,
    "fiarse": fiarse,
    "depthfl": depthfl,
}
