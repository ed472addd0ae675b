"""Crops and flips, against a twin that goes pixel by pixel."""

import itertools

import pytest
import torch

from fedcover.data.augment import AUGMENTATIONS, PADDING, crop_flip
from fedcover.errors import InvalidValue
from fedcover.rng import generator


def augmented(x, draw, name="crop-flip"):
    how = AUGMENTATIONS[name]
    return how.apply(x, how.draw(len(x), draw))


def images(batch=6, channels=3, height=5, width=7):
    """Every pixel of every image has its own value, and none is zero."""
    return torch.arange(1.0, 1 + batch * channels * height * width).view(
        batch, channels, height, width
    )


def crop(image, down, right, mirrored):
    """One image cut out of its border of zeros, one pixel at a time."""
    height, width = image.shape[1:]
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            r, c = row + down - PADDING, column + right - PADDING
            if 0 <= r < height and 0 <= c < width:
                out[:, row, width - 1 - column if mirrored else column] = image[:, r, c]
    return out


def explanations(image, found):
    """All the crops that look like what was found."""
    places = range(2 * PADDING + 1)
    return [
        (down, right, mirrored)
        for down in places for right in places for mirrored in (False, True)
        if torch.equal(crop(image, down, right, mirrored), found)
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 8, 8), (2, 9, 4)])
def test_augmented_image_is_a_crop_of_itself(shape):
    x = images(8, *shape)
    augmented_images = augmented(x, generator(0, "augment"))
    assert augmented_images.shape == x.shape
    assert augmented_images.dtype == x.dtype
    assert all(len(explanations(x[i], augmented_images[i])) >= 1 for i in range(len(x)))


def test_augment_draws_all_crops_and_both_sides():
    image = images(1, 1, 12, 12)[0]
    augmented_images = augmented(image.expand(400, 1, 12, 12), generator(1, "augment"))
    places = list(itertools.product(range(2 * PADDING + 1), range(2 * PADDING + 1), (False, True)))
    crops = torch.stack([crop(image, *place) for place in places])
    alike = (augmented_images[:, None] == crops).flatten(2).all(2)
    assert bool((alike.sum(1) == 1).all())  # one crop and no other
    downs, rights, sides = zip(*(places[i] for i in alike.int().argmax(1).tolist()), strict=True)
    assert set(downs) == set(rights) == set(range(2 * PADDING + 1))
    assert 150 < sum(sides) < 250
    assert (
        len(set(zip(downs, rights, strict=True))) > 70
    )  # rows and columns are drawn apart: 81 pairs


def test_augment_depends_on_the_generator_alone():
    x = images()
    assert torch.equal(augmented(x, generator(0, "a")), augmented(x, generator(0, "a")))
    assert not torch.equal(augmented(x, generator(0, "a")), augmented(x, generator(0, "b")))
    one = generator(0, "a")
    assert not torch.equal(augmented(x, one), augmented(x, one))  # each batch has its own


def test_augment_leaves_its_input_unchanged():
    x = images()
    before = x.clone()
    augmented(x, generator(0, "a")).zero_()
    augmented(x, generator(0, "a"), "none")
    assert torch.equal(x, before)


def test_augment_none_returns_the_input():
    x, draw = images(), generator(0, "a")
    state = draw.get_state()
    assert augmented(x, draw, "none") is x
    assert torch.equal(draw.get_state(), state)


def test_augment_refuses_what_is_not_an_image():
    with pytest.raises(InvalidValue, match=r"^augment crop-flip needs images .*; got \(4,\)$"):
        crop_flip(torch.ones(2, 4), torch.zeros(2, 3))
