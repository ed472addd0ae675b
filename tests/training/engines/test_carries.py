"""What recipes remember is a tree of tensors, and engines train what `sequential` trains."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from fedcover.tensors import FlatParams, concat, named_shapes, tree_leaves
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Recipe
from tests.helpers.engines import UNEQUAL, agree
from tests.helpers.worlds import world

EQUAL_AND_UNEQUAL = [{}, {**UNEQUAL, "model": "mlp(hidden=[6])"}]


class Remembered(NamedTuple):
    last: dict
    seen: list


def remembering(start, observe):
    """Plain SGD with a loss that depends on what is remembered, so that a mistake changes it."""

    def loss(forward, params, batch, carry):
        views = [concat(p.values()) if isinstance(p, FlatParams) else p for p in tree_leaves(carry)]
        strength = sum(tensor.to(torch.float32).tanh().mean() for tensor in views)
        return cross_entropy(forward, params, batch, ()) * (1 + strength / 10)

    return Recipe(loss, start, observe)


def backwards(tensors):
    return dict(reversed(tensors.items()))


@pytest.mark.parametrize("fields", EQUAL_AND_UNEQUAL, ids=["equal", "unequal"])
def test_recipes_may_remember_any_tree_of_tensors(fields, fast, caplog):
    """Named tuples, lists, views of one tensor, and dicts in an order that changes."""

    def start(assignment, params):
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        flat = FlatParams(concat(zeros.values()), named_shapes(zeros))
        first = zeros if assignment.client.id % 2 else backwards(zeros)
        return Remembered(first, [flat, torch.tensor(1.0)])

    def observe(carry, gradients):
        totals, count = carry.seen
        totals = {name: 0.5 * total + gradients[name] for name, total in totals.items()}
        return Remembered(backwards(gradients), [totals, count + 1])

    setup, state = world("mlp", policy="prefix", **fields)
    recipe = remembering(start, observe)
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)
    assert not caplog.records


@pytest.mark.parametrize(
    "observe",
    [
        lambda carry, gradients: {**carry, "more": carry["count"]},
        lambda carry, gradients: {"count": carry["count"].double()},
        lambda carry, gradients: {"count": carry["count"].expand(2)},
        lambda carry, gradients: {"count": [carry["count"]]},
        lambda carry, gradients: tree_leaves(carry),
    ],
    ids=["more", "dtype", "shape", "deeper", "list"],
)
def test_recipe_whose_memory_changes_its_structure_is_trained_one_after_another(
    observe, fast, caplog
):
    setup, state = world("mlp", policy="full", epochs=1)
    recipe = remembering(lambda assignment, params: {"count": torch.tensor(1.0)}, observe)
    agree(replace(setup, task=replace(setup.task, recipe=recipe)), state, fast)
    assert "does not keep its names, shapes and types" in caplog.text
