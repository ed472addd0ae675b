"""Words for the command line, and what a refusal looks like."""

import re

from tests.helpers.runs import TINY


def changed(**fields: object) -> list[str]:
    return [
        word
        for key, value in {**TINY, "rounds": 2, **fields}.items()
        for word in ("--set", f"{key}={value}")
    ]


def refused(answer: tuple[int, str, str], code: int, sentence: str) -> None:
    """One line on the error stream, and no output."""
    assert answer[0] == code, answer
    assert answer[1] == ""
    assert re.fullmatch(rf"fedcover: [^\n]*{sentence}[^\n]*\n", answer[2]), answer[2]
