"""A transformer over characters: heads, hidden units and the embedding stream are cut, and it learns all the same."""

import math

import pytest
import torch

import fedcover as fc
from fedcover.datasets import load

SMALL = "transformer(width=32, heads=4, blocks=1, hidden=32)"


def test_the_text_is_cut_into_pieces_that_predict_themselves():
    data = load("characters")
    assert data.train.x.shape[1:] == data.train.y.shape[1:] == (64,)
    assert torch.equal(data.train.x[0, 1:], data.train.y[0, :-1])
    assert int(data.train.x.max()) < data.classes == 128
    assert data.owner is not None
    assert len(data.owner) == len(data.train)
    assert len(data.owner.unique()) == int(data.owner.max()) + 1


@pytest.mark.parametrize("policy", ["prefix", "rolling", "random"])
def test_it_learns_under_every_kind_of_sub_network(policy):
    topics = int(load("characters").owner.max()) + 1
    run = fc.run(
        fc.Experiment(
            dataset="characters", partition="owner", clients=topics, active=8, model=SMALL, policy=policy,
            fleet="1x1.0 + 1x0.5", rounds=2, epochs=1, lr=0.5, clip=1.0,
        )
    )  # fmt: skip
    assert run.summary["loss"] < 0.8 * math.log(128)
    assert run.summary["accuracy"] > 0.1


def test_a_half_sized_part_has_half_of_the_heads_and_of_the_stream():
    run = fc.run(
        fc.Experiment(dataset="characters", clients=700, active=1, rounds=1, epochs=1, model=SMALL, policy="prefix")
    )
    part = run.submodel(0.5)
    assert part.characters.weight.shape == (128, 16)
    assert part.blocks[0].attention.qkv.weight.shape == (3 * 16, 16)
    assert part(torch.zeros(2, 64, dtype=torch.int64)).shape == (2, 128, 64)
