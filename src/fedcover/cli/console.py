"""What people see: progress on long work, tables at the end, one sentence when something is wrong."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedcover.errors import printable
from fedcover.runs.api import RoundCallback
from fedcover.runs.metrics_log import UNANSWERED
from fedcover.server.round import RoundReport

LONGEST_WORD = 20
"""What is longer, such as the name of a file, is broken rather than a heading."""

errors = Console(stderr=True, highlight=False, markup=False, emoji=False)


def notify(sentence: str) -> None:
    """Tell the user something, as it is and on one line, on the error stream."""
    errors.print("\n".join(map(printable, sentence.split("\n"))), soft_wrap=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Tell it to the user."""
        notify(record.getMessage())


@contextmanager
def show_log() -> Iterator[None]:
    """Show what the library logs, a line each, above a bar that may be there."""
    log, handler = logging.getLogger("fedcover"), _Lines()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def show_progress(title: str, rounds: int, done: int = 0) -> Iterator[RoundCallback]:
    """Show rounds as they end: a bar on a terminal, plain lines elsewhere; always on the error stream."""
    if not errors.is_terminal:
        yield _plain(title, rounds)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors) as bar:
        task = bar.add_task(title, total=rounds, completed=done, figures="")
        latest: dict[str, Any] = {}

        def show(report: RoundReport) -> None:
            latest.update(report.metrics)
            bar.update(task, completed=report.round + 1, figures=_figures(latest))

        yield show


def _plain(title: str, rounds: int) -> RoundCallback:
    started: list[tuple[float, int]] = []

    def show(report: RoundReport) -> None:
        now = time.monotonic()
        started.append((now - sum(report.metrics["seconds"].values()), report.round))
        since, first = started[0]
        left = (now - since) / (report.round + 1 - first) * (rounds - report.round - 1)
        time_left = timedelta(seconds=round(left))
        line = f"{title}  round {report.round + 1}/{rounds}  {_figures(report.metrics)}  {time_left} left"
        print(line, file=sys.stderr, flush=True)

    return show


def _figures(metrics: dict[str, Any]) -> str:
    run = f"{metrics['run']}  " if "run" in metrics else ""  # one of several
    accuracy = f"accuracy {metrics['accuracy']:.3f}  " if "accuracy" in metrics else ""
    missing = "".join(f"  {metrics[event]} {event}" for event in UNANSWERED if metrics.get(event))
    return f"{run}{accuracy}coverage {metrics['gamma_round']} (window {metrics['gamma_window']}){missing}"


def as_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table with numbers to the right; where there is little room, words are broken and numbers are not."""
    numbers = [
        all(isinstance(row[place], int | float | None) for row in rows)
        for place in range(len(columns))
    ]
    texts = [[_text(cell) for cell in row] for row in rows]
    cells = [[row[place] for row in texts] for place in range(len(columns))]
    widths = _widths(columns, cells, numbers, output().width)
    made = Table(title=title, title_justify="left", title_style="bold")
    for place, (column, number) in enumerate(zip(columns, numbers, strict=True)):
        made.add_column(
            column, justify="right" if number else "left", no_wrap=place == 0 and not number, overflow="fold",
            width=widths[place] if number else None,
        )  # fmt: skip
    for row in texts:
        made.add_row(*map(Text, row))
    return made


def _widths(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numbers: Sequence[bool], room: int
) -> Sequence[int]:
    """Widths that cut no number: headings on one line if there is room, else word by word, else broken anywhere."""
    bodies = [
        _longest(texts)
        if number or place == 0
        else min(LONGEST_WORD, _longest(" ".join(texts).split()))
        for place, (texts, number) in enumerate(zip(cells, numbers, strict=True))
    ]
    borders = 3 * len(columns) + 1
    for heads in ([len(name) for name in columns], [_longest(name.split()) for name in columns]):
        widths = list(map(max, heads, bodies))
        if sum(widths) + borders <= room:
            return widths
    for _ in range(
        room - borders - sum(bodies)
    ):  # what is left goes where a heading is broken most often
        narrowest = max(range(len(columns)), key=lambda place: heads[place] / bodies[place])
        bodies[narrowest] += 1
    return bodies


def _longest(texts: Sequence[str]) -> int:
    return max([1, *map(len, texts)])


def output() -> Console:
    """The output stream; a file or a pipe has no width that would justify cutting words."""
    terminal = Console().is_terminal
    return Console(highlight=False, markup=False, emoji=False, width=None if terminal else 200)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    output().print(as_table(title, columns, rows))


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else printable(str(cell))


def show_json(value: object) -> None:
    """Print a value as JSON on the output stream."""
    print(json.dumps(value, indent=2), flush=True)
