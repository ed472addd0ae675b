"""Recipes: what a local step is. Plain SGD, and the systems that change the loss or what becomes of the result."""

from collections.abc import Callable

from fedcover.recipes.depthfl import depthfl
from fedcover.recipes.fedmask import fedmask
from fedcover.recipes.fiarse import fiarse
from fedcover.recipes.fjord import fjord
from fedcover.recipes.hermes import hermes
from fedcover.recipes.labels import own_labels as own_labels
from fedcover.recipes.plain import plain, prox
from fedcover.recipes.prunefl import prunefl
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
