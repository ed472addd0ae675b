"""Readers can distinguish the colours of the page, also if they are colour-blind."""

import re
from itertools import combinations

import numpy as np
import pytest

from fedcover.analysis.report.page import asset
from fedcover.runs import plotting

BLIND = {
    "nobody": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
"""What linear red, green and blue become for colour-blind eyes (Machado, Oliveira, Fernandes 2009,
severity 1).
"""


def linear(colour):
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.072175],
            [0.0193339, 0.119192, 0.9503041],
        ]
    )
    ratio = (to_xyz @ rgb) / to_xyz.sum(1)
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a, b):
    bright, dark = sorted(
        (float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True
    )
    return (bright + 0.05) / (dark + 0.05)


def colours(name):
    """The light and the dark value of a colour of the style sheet."""
    return re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", asset("page.css")).groups()


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", BLIND)
def test_line_colours_differ_for_colour_blind_readers(theme, eyes):
    colours_seen = [
        lab(np.clip(BLIND[eyes] @ linear(colours(f"c{n}")[theme]), 0, 1)) for n in range(8)
    ]
    assert (
        min(np.linalg.norm(a - b) for a, b in combinations(colours_seen, 2)) > 20
    )  # two or three is just noticeable


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_of_lines_and_text_is_sufficient(theme):
    for background in ("card", "page"):
        for name in ("text", "soft", "warn", "link"):
            assert contrast(colours(name)[theme], colours(background)[theme]) >= 4.5, name
    for name in [*(f"c{n}" for n in range(8)), "held"]:
        assert contrast(colours(name)[theme], colours("card")[theme]) >= 3, name


def test_matplotlib_colours_equal_page_colours():
    assert tuple(colours(f"c{n}")[0] for n in range(8)) == plotting.COLOURS
