"""What the user sees: progress bars, result tables, and error messages."""

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
"""Longer words, such as file names, are broken before a heading is."""

errors = Console(stderr=True, highlight=False, markup=False, emoji=False)


def notify(sentence: str) -> None:
    """Print a message on the error stream, without wrapping it."""
    errors.print("\n".join(map(printable, sentence.split("\n"))), soft_wrap=True)


class _NotifyHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a log record."""
        notify(record.getMessage())


@contextmanager
def show_log() -> Iterator[None]:
    """Print the library's log messages, one per line, above a progress bar if there is one."""
    logger, handler = logging.getLogger("fedcover"), _NotifyHandler()
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)


@contextmanager
def show_progress(title: str, rounds: int, rounds_done: int = 0) -> Iterator[RoundCallback]:
    """Show each finished round on the error stream.

    On a terminal this is a progress bar; in a file or pipe it is one line per round.
    """
    if not errors.is_terminal:
        yield _progress_lines(title, rounds)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors) as bar:
        task = bar.add_task(title, total=rounds, completed=rounds_done, metrics="")
        latest_metrics: dict[str, Any] = {}  # a round without evaluation keeps the last accuracy

        def show(report: RoundReport) -> None:
            latest_metrics.update(report.metrics)
            bar.update(task, completed=report.round + 1, metrics=_metrics_text(latest_metrics))

        yield show


def _progress_lines(title: str, rounds: int) -> RoundCallback:
    start: tuple[float, int] | None = None  # when the first round began, and its number

    def show(report: RoundReport) -> None:
        nonlocal start
        now = time.monotonic()
        if start is None:
            start = now - sum(report.metrics["seconds"].values()), report.round
        start_time, first_round = start
        rounds_done = report.round + 1
        seconds_per_round = (now - start_time) / (rounds_done - first_round)
        time_left = timedelta(seconds=round(seconds_per_round * (rounds - rounds_done)))
        metrics = _metrics_text(report.metrics)
        line = f"{title}  round {rounds_done}/{rounds}  {metrics}  {time_left} left"
        print(line, file=sys.stderr, flush=True)

    return show


def _metrics_text(metrics: dict[str, Any]) -> str:
    parts = []
    if "run" in metrics:  # one of several runs of a sweep
        parts.append(metrics["run"])
    if "accuracy" in metrics:
        parts.append(f"accuracy {metrics['accuracy']:.3f}")
    parts.append(f"coverage {metrics['gamma_round']} (window {metrics['gamma_window']})")
    parts += [f"{metrics[event]} {event}" for event in UNANSWERED if metrics.get(event)]
    return "  ".join(parts)


def as_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a table with numbers aligned to the right.

    On a narrow terminal words are broken and numbers are not.
    """
    is_numeric = [
        all(isinstance(row[index], int | float | None) for row in rows)
        for index in range(len(columns))
    ]
    texts = [[_text(cell) for cell in row] for row in rows]
    texts_by_column = [[row[index] for row in texts] for index in range(len(columns))]
    widths = _widths(columns, texts_by_column, is_numeric, output().width)
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if is_numeric[index] else "left",
            no_wrap=index == 0 and not is_numeric[index],
            overflow="fold",
            width=widths[index] if is_numeric[index] else None,
        )
    for row in texts:
        table.add_row(*map(Text, row))
    return table


def _widths(
    columns: Sequence[str],
    texts_by_column: Sequence[Sequence[str]],
    is_numeric: Sequence[bool],
    available: int,
) -> Sequence[int]:
    """Return column widths that cut no number.

    Headings are on one line if possible, otherwise broken between words, otherwise anywhere.
    """
    body_widths = []
    for index, texts in enumerate(texts_by_column):
        if is_numeric[index] or index == 0:
            body_widths.append(_longest(texts))
        else:
            body_widths.append(min(LONGEST_WORD, _longest(" ".join(texts).split())))
    borders = 3 * len(columns) + 1
    one_line = [len(name) for name in columns]
    longest_words = [_longest(name.split()) for name in columns]
    for heading_widths in (one_line, longest_words):
        widths = list(map(max, heading_widths, body_widths))
        if sum(widths) + borders <= available:
            return widths
    # Give each column left to the column whose heading is broken most often.
    for _ in range(available - borders - sum(body_widths)):
        most_broken = max(
            range(len(columns)), key=lambda index: longest_words[index] / body_widths[index]
        )
        body_widths[most_broken] += 1
    return body_widths


def _longest(texts: Sequence[str]) -> int:
    return max([1, *map(len, texts)])


def output() -> Console:
    """Return the output stream. A file or a pipe has no width, so it gets a wide one."""
    is_terminal = Console().is_terminal
    return Console(highlight=False, markup=False, emoji=False, width=None if is_terminal else 200)


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
