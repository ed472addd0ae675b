"""Designs in the style of the paper for shares that its codenames cannot express."""

from collections.abc import Sequence

from fedcover.errors import InvalidValue, unknown
from fedcover.policies.paper_regions import CODENAME_KINDS, region_reductions
from fedcover.types import Reduction, View


def quarters(view: View, *, slots: str, kind: str = "pruning") -> Sequence[Reduction]:
    """Give the k-th client of the cohort the regions of the k-th word.

    For example, "1234 12 34" is one whole model and two halves.
    """
    if kind not in CODENAME_KINDS:
        raise unknown("kind", kind, CODENAME_KINDS)
    words = slots.split()
    if any(not word or set(word) - set("1234") or len(set(word)) < len(word) for word in words):
        raise InvalidValue(
            f"slots must be words of the digits 1 to 4, each at most once in a word; got {slots!r}"
        )
    if len(words) != len(view.cohort):
        raise InvalidValue(
            f"slots must name one word for each of {len(view.cohort)} clients; got {len(words)}"
        )
    return region_reductions(
        view, [tuple(sorted(int(digit) for digit in word)) for word in words], kind
    )


def slot_coverage(slots: str) -> int:
    """Return the fewest slots that hold any region.

    This is the coverage if every parameter belongs to one region.

    >>> slot_coverage("1234 1234 1234 1234 14 23 13 24 12 34")
    7
    """
    return min(sum(region in word for word in slots.split()) for region in "1234")
