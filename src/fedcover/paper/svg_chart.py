"""Draw curves with seed bands as a small SVG file. Equal results give equal files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 380, 260, 52, 34, 70, 190
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
DASHES = ("", "6 3", "2 3")
"""Eight colours that suit colour-blind readers; after that the same with dashes."""

MAX_BANDS = 8
"""With more lines than this, bands would hide each other."""


@dataclass(frozen=True)
class Series:
    """One line: for every seed, a value after each of some rounds."""

    name: str
    rounds: Sequence[int]
    values: Sequence[Sequence[float]]


def chart(title: str, panels: Sequence[tuple[str, Sequence[Series]]]) -> str:
    """Return panels over the rounds with one legend.

    If there are few lines, bands span the lowest to the highest seed.
    """
    names = list(dict.fromkeys(series.name for _, lines in panels for series in lines))
    width = LEFT + len(panels) * (WIDTH + GAP) + LEGEND
    height = max(TOP + HEIGHT + 44, TOP + 16 * len(names) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for place, (label, lines) in enumerate(panels):
        parts += _panel(LEFT + place * (WIDTH + GAP), label, lines, names)
    x = LEFT + len(panels) * (WIDTH + GAP) - 40
    for place, name in enumerate(names):
        y = TOP + 10 + 16 * place
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" {_stroke(place)}/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _stroke(place: int) -> str:
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="1.6" fill="none"{dashed}'


def _panel(left: int, label: str, lines: Sequence[Series], names: Sequence[str]) -> list[str]:
    values = sorted(value for series in lines for seed in series.values for value in seed)
    # The first rounds are far from the rest: a tenth of the points may be outside on that side.
    far = len(values) // 10
    low, high = (values[0], values[-1 - far]) if label == "loss" else (values[far], values[-1])
    margin = 0.05 * ((high - low) or 1.0)
    low, high = low - margin, high + margin
    last = max(max(series.rounds) for series in lines)

    def x(round: float) -> float:
        return left + WIDTH * round / last

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    def points(series: Series, of: Callable[[Sequence[float]], float]) -> list[str]:
        by_round = zip(*series.values, strict=True)
        return [
            f"{x(round):.1f},{y(of(seeds)):.1f}"
            for round, seeds in zip(series.rounds, by_round, strict=True)
        ]

    frame = f'x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<clipPath id="{label}"><rect {frame}/></clipPath>',
        f'<rect {frame} fill="none" stroke="#999"/>',
    ]
    for value in ticks(low, high):
        parts.append(
            f'<text x="{left - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for round in ticks(0, last):
        parts.append(
            f'<text x="{x(round):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{round:g}</text>'
        )
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">round</text>'
    )
    parts.append(f'<text x="{left + 6}" y="{TOP + 16}" font-weight="bold">{label}</text>')
    parts.append(f'<g clip-path="url(#{label})">')
    for series in lines:
        place = names.index(series.name)
        if len(series.values) > 1 and len(names) <= MAX_BANDS:
            band = " ".join([*points(series, max), *reversed(points(series, min))])
            parts.append(
                f'<polygon points="{band}" fill="{COLOURS[place % len(COLOURS)]}" opacity="0.15"/>'
            )
        parts.append(f'<polyline points="{" ".join(points(series, fmean))}" {_stroke(place)}/>')
    return [*parts, "</g>"]


def ticks(low: float, high: float) -> list[float]:
    """Return four to ten round numbers between two others.

    >>> ticks(0.508, 1.01)
    [0.6, 0.7, 0.8, 0.9, 1.0]
    """
    size = 10 ** math.floor(math.log10((high - low) / 4))
    step = max(size * factor for factor in (1, 2, 5) if size * factor <= (high - low) / 4)
    return [round(step * n, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
