"""Ranks as units: counted exactly, averaged over those who hold them; and what averaging factors
apart loses.
"""

import torch

from fedcover.models.lora import factors_of, product_gap
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import run_round
from fedcover.training.local_sgd import train_client
from tests.helpers.worlds import same, world


def test_lora_ranks_are_averaged_over_their_holders():
    setup, state = world("lora", policy="prefix", fleet="1x1.0 + 1x0.5", active=6)
    cohort = cohort_of(setup, 0)
    parts = setup.policy(view_of(setup, state, cohort))
    trained = [
        train_client(setup.task, state, c, part, setup.lr(0)).params
        for c, part in zip(cohort, parts, strict=True)
    ]
    after, _ = run_round(setup, state)
    large = sum(client.capacity == 1.0 for client in cohort)
    assert 0 < large < 6
    counts = after.coverage.window[-1]
    assert counts["hidden1.down.weight"].amin(1).tolist() == [6, 6, large, large]
    assert counts["hidden1.up.weight"].amin(0).tolist() == [6, 6, large, large]
    for rank in range(4):
        client_rows = [
            params["hidden1.down.weight"][rank]
            for params in trained
            if len(params["hidden1.down.weight"]) > rank
        ]
        same(
            {"rank": after.params["hidden1.down.weight"][rank]},
            {"rank": torch.stack(client_rows).mean(0)},
            1e-12,
        )


def test_lora_leaves_frozen_layers_unchanged():
    setup, state = world("lora", policy="rolling")
    assert not [name for name in state.params if name.endswith(("hidden1.weight", "head.weight"))]
    before = setup.task.model.module.hidden1.weight.clone()
    run_round(setup, state)
    assert torch.equal(setup.task.model.module.hidden1.weight, before)


def test_product_gap_by_hand():
    draw = torch.Generator().manual_seed(0)
    downs = [torch.randn(2, 5, generator=draw) for _ in range(3)]
    up = torch.randn(4, 2, generator=draw)
    assert product_gap([(up, down) for down in downs]) < 1e-6
    ups = [torch.randn(4, 2, generator=draw) for _ in range(3)]
    products = torch.stack([u @ d for u, d in zip(ups, downs, strict=True)]).mean(0)
    means = torch.stack(ups).mean(0) @ torch.stack(downs).mean(0)
    expected = float((means - products).norm() / products.norm())
    assert abs(product_gap(list(zip(ups, downs, strict=True))) - expected) < 1e-6
    assert expected > 0.1


def test_factors_of_a_layer_have_its_shape():
    _, state = world("lora")
    up, down = factors_of(state.params, "hidden1")
    assert (up.shape, down.shape) == ((8, 4), (4, 12))
