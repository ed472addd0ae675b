"""The order in which people expect values: numbers by size, words by letters."""

import re

NUMBER = re.compile(r"((?:(?<!\w)-)?\d+(?:\.\d+)?(?:e[-+]?\d+)?)")


def natural_key(text: str) -> tuple[str | float, ...]:
    """A key to sort texts by.

    >>> sorted(["lr 0.1", "lr 0.02", "lr 1e-05", "run10", "run9"], key=natural_key)
    ['lr 1e-05', 'lr 0.02', 'lr 0.1', 'run9', 'run10']
    """
    # words and numbers take turns, so that like is always compared with like
    return tuple(float(part) if place % 2 else part for place, part in enumerate(NUMBER.split(text)))
