"""The table of architectures in docs/tracing.md is what was measured, and says enough."""

from benchmarks.architectures.__main__ import RESULTS, rows_in
from benchmarks.architectures.families import architectures
from benchmarks.architectures.page import DOCUMENT, page, share_cut, written

ROWS = rows_in(RESULTS)


def test_architectures_have_one_row_each():
    assert sorted(
        (row["library"], row["family"], row["model"], str(row["options"])) for row in ROWS
    ) == sorted(
        (each.library, each.family, each.model, str(dict(each.options))) for each in architectures()
    )
    assert {row["outcome"] for row in ROWS} <= {"cut", "whole", "unable", "late", "broken", "large"}


def test_timm_families_are_cut_in_95_of_100_cases():
    cut, running = share_cut(ROWS)
    assert running > 90
    assert cut >= 0.95 * running


def test_architectures_that_are_cut_have_figures():
    for row in ROWS:
        if row["outcome"] == "cut":
            assert row["groups"] > 0
            assert 0.1 < row["half"] < 1
        else:
            assert row["reason"]


def test_tracing_page_shows_the_table_of_architectures():
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
