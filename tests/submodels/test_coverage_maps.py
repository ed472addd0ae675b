"""The pictures of who trained what say what the masks say, and stay small."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcover.server.round import run_round
from fedcover.submodels import coverage
from fedcover.submodels.coverage_maps import (
    MAX_MAPPED_CLIENTS,
    MAX_MAPPED_LAYERS,
    SIDE,
    encode_pixels,
    map_of_part,
    mapped_layers,
    round_coverage_maps,
    shrink,
)
from fedcover.submodels.reductions import Masks, TrainedSubset, drawn, windows
from fedcover.types import Client, Cut, UnitGroup, Update
from tests.helpers.worlds import world


def digits(text):
    return [int(digit) for digit in re.sub(r"(\d)([a-z])", lambda m: m[1] * (ord(m[2]) - 95), text)]


def read(text, shape):
    """The slow twin of the page's reader: a picture as an array of levels (strips: of the products
    of shares).
    """
    rows, columns = min(SIDE, shape[0]), min(SIDE, shape[1] if len(shape) > 1 else 1)

    def strip(part, length):
        return np.array(digits(part) * length if len(part) == 1 else digits(part))

    if "/" in text:
        down, across = text.split("/")
        return np.outer(share(strip(down, rows)), share(strip(across, columns)))
    return share(strip(text, rows * columns)).reshape(rows, columns)


def share(level):
    return np.where(level == 0, 0, np.where(level == 9, 1, (level - 0.5) / 8))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=200))
def test_encoded_pixels_are_read_again_and_none_and_all_are_exact(values):
    text = encode_pixels(values)
    levels = digits(text) if len(text) > 1 or len(values) == 1 else digits(text) * len(values)
    assert len(levels) == len(values)
    for level, value in zip(levels, values, strict=True):
        assert (level == 0) == (value == 0)
        assert (level == 9) == (value == 1)
        assert abs(float(share(np.array(level))) - value) <= 1 / 16 + 1e-6


@pytest.mark.parametrize("shape", [(30, 17), (5, 40, 3, 3), (4, 4), (64, 1)])
def test_map_of_slices_equals_map_of_their_masks(shape):
    groups = (UnitGroup("out", shape[0], (Cut("w", 0),)), UnitGroup("in", shape[1], (Cut("w", 1),)))
    layers = {"w": torch.zeros(shape)}
    for part in (
        windows(groups, 0.5),
        windows(groups, 0.3, {"out": shape[0] - 1}),
        drawn(groups, 0.6, key=3),
    ):
        (text,) = map_of_part(part, layers)
        expected = shrink(part.mask(layers)["w"].float()).numpy()
        assert np.abs(read(text, shape) - expected).max() <= 2 / 16 + 1e-6
        assert ((read(text, shape) == 0) == (expected == 0)).all()


def test_map_of_masks_and_trained_subsets():
    bits = torch.zeros(24, 24, dtype=torch.bool)
    bits[:12] = True
    layers = {"w": torch.zeros(24, 24)}
    assert map_of_part(Masks({"w": bits}), layers) == ["9z9z9q0z0z0q"]
    assert map_of_part(Masks({}), layers) == ["9"]
    assert map_of_part(
        TrainedSubset(Masks({}), {"w": torch.zeros(24, 24, dtype=torch.bool)}), layers
    ) == ["0"]


def test_map_of_a_third_axis_is_averaged():
    groups = (UnitGroup("taps", 4, (Cut("w", 2),)),)
    (text,) = map_of_part(windows(groups, 0.5), {"w": torch.zeros(6, 6, 4)})
    assert set(digits(text)) == {5}


@pytest.mark.parametrize("name", ["mlp", "cnn", "depth_resnet", "lora"])
def test_round_has_coverage_maps_for_every_model(name):
    setup, state = world(name, policy="random")
    after, report = run_round(setup, state)
    maps = report.metrics["pictures"]
    assert maps["clients"].keys() == report.metrics["clients"].keys()
    assert set(maps["clients"].values()) == set(range(len(maps["parts"])))
    counts = after.coverage.window[-1]
    assert maps["layers"].keys() == {name for name, tensor in counts.items() if tensor.ndim > 1}
    for place, (layer, shape) in enumerate(maps["layers"].items()):
        assert shape == list(counts[layer].shape)
        missed = read(maps["missed"][place], shape)
        assert (missed.max() > 0) == bool((counts[layer] == 0).any())
        expected = shrink(counts[layer].float() / len(maps["clients"]))
        assert np.abs(read(maps["trained"][place], shape) - expected.numpy()).max() <= 1 / 16 + 1e-6


def updates(number, part):
    clients = [Client(id, 1.0 if id < number // 2 else 0.5, id, 1, ()) for id in range(number)]
    return [Update(client, part, part, {}, {}, {}, {}, 0.0) for client in clients]


def test_coverage_maps_of_a_large_cohort_show_each_capacity():
    part = Masks({})
    many = updates(1000, part)
    maps = round_coverage_maps(coverage.count({"w": torch.zeros(3, 3)}, [part] * 1000), many)
    assert len(maps["clients"]) == MAX_MAPPED_CLIENTS
    assert {int(client) < 500 for client in maps["clients"]} == {True, False}
    assert maps["parts"] == [["9"]]
    assert maps["trained"] == ["9"]


def test_coverage_maps_of_a_round_without_answers():
    maps = round_coverage_maps(coverage.count({"w": torch.zeros(3, 3)}, []), [])
    assert (maps["clients"], maps["parts"], maps["trained"], maps["missed"]) == (
        {},
        [],
        ["0"],
        ["9"],
    )


def test_coverage_maps_of_a_deep_model_show_the_largest_layers():
    deep = {f"layer{n}": torch.zeros(2, 1 + n % 3) for n in range(200)}
    layers = mapped_layers(deep)
    assert len(layers) == MAX_MAPPED_LAYERS
    assert list(layers) == [name for name in deep if name in layers]
    assert min(t.numel() for t in layers.values()) >= max(
        t.numel() for n, t in deep.items() if n not in layers
    )
    assert list(mapped_layers({"bias": torch.zeros(3)})) == ["bias"]
