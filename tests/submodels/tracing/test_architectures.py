"""The table of architectures in docs/tracing.md is what was measured, and says enough."""

from benchmarks.architectures.__main__ import RESULTS, rows_in
from benchmarks.architectures.families import architectures
from benchmarks.architectures.page import DOCUMENT, page, share_cut, written

ROWS = rows_in(RESULTS)


def test_every_architecture_has_one_row():
    assert sorted(
        (row["library"], row["family"], row["model"], str(row["options"])) for row in ROWS
    ) == sorted(
        (each.library, each.family, each.model, str(dict(each.options))) for each in architectures()
    )
    assert {row["outcome"] for row in ROWS} <= {"cut", "whole", "unable", "late", "broken", "large"}


def test_of_the_families_of_timm_that_run_95_of_100_are_cut():
    cut, running = share_cut(ROWS)
    assert running > 90
    assert cut >= 0.95 * running


def test_what_is_cut_is_smaller_and_has_figures():
    for row in ROWS:
        if row["outcome"] == "cut":
            assert row["groups"] > 0
            assert 0.1 < row["half"] < 1
        else:
            assert row["reason"]


def test_the_document_shows_the_table():
    text = DOCUMENT.read_text()
    assert written(text, ROWS) == text


def test_late_and_broken_families_count_as_not_cut():
    row = {
        "library": "timm",
        "family": "a",
        "model": "a_tiny",
        "options": {},
        "date": "2026-01-01",
        "fedcover": "0",
    }
    cut = {**row, "outcome": "cut", "groups": 3, "half": 0.25, "difference": 0.0}
    rows = [
        cut,
        *(
            {**row, "outcome": name, "reason": "so|so"}
            for name in ("late", "broken", "large", "whole", "unable")
        ),
    ]
    assert share_cut(rows) == (1, 5)
    text = page(rows)
    assert "**1 of these 5 (20.0 %)**" in text
    assert text.count("so\\|so") == 5
