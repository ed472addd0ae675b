"""Curves with seed bands as a small SVG file: the same results always give the same file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 380, 260, 52, 34, 70, 190
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8c6d31")
DASHES = ("", "6 3", "2 3")
"""Eight colours that colour-blind readers tell apart, then the same again with dashes."""


@dataclass(frozen=True)
class Series:
    """One line: a value after each of some rounds, for every seed."""

    name: str
    rounds: Sequence[int]
    values: Sequence[Sequence[float]]


def chart(title: str, panels: Sequence[tuple[str, Sequence[Series]]]) -> str:
    """Panels side by side over the rounds, with one legend; a band reaches from the lowest to the highest seed."""
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
    # the first rounds lie far from the rest: a tenth of the points may leave the picture on that side
    far = len(values) // 10
    low, high = (values[0], values[-1 - far]) if label == "loss" else (values[far], values[-1])
    span = (high - low) or 1.0
    low, high = low - 0.05 * span, high + 0.05 * span
    last = max(max(series.rounds) for series in lines)

    def x(round: float) -> float:
        return left + WIDTH * round / last

    def y(value: float) -> float:
        inside = min(max(value, low), high)
        return TOP + HEIGHT * (high - inside) / (high - low)

    parts = [f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for step in range(5):
        value, round = low + (high - low) * step / 4, last * step / 4
        parts.append(f'<text x="{left - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        parts.append(f'<text x="{x(round):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{round:g}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{label}, by round</text>')
    for series in lines:
        place = names.index(series.name)
        by_round = list(zip(*series.values, strict=True))
        colour = COLOURS[place % len(COLOURS)]
        if len(series.values) > 1:
            upper = [f"{x(r):.1f},{y(max(v)):.1f}" for r, v in zip(series.rounds, by_round, strict=True)]
            lower = [f"{x(r):.1f},{y(min(v)):.1f}" for r, v in zip(series.rounds, by_round, strict=True)]
            parts.append(f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{colour}" opacity="0.15"/>')
        points = " ".join(f"{x(r):.1f},{y(fmean(v)):.1f}" for r, v in zip(series.rounds, by_round, strict=True))
        parts.append(f'<polyline points="{points}" {_stroke(place)}/>')
    return parts
