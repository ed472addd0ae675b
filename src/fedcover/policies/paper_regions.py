"""The paper's designs: four regions S1-S4, seven policies P1-P7, and codenames that give one to every slot.

Zhou, Lan, Venkataramani, Ding: Every Parameter Matters (NeurIPS 2023), appendix. Pruning: S1 holds the largest
quarter of each prunable layer's weights, S4 the smallest. Sub-networks: quarters of every group's units, in order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, unknown
from fedcover.policies.base import prunable_weights
from fedcover.policies.magnitude import rank_by_magnitude
from fedcover.submodels.reductions import Masks, Slices
from fedcover.types import Reduction, UnitGroup, View

REGIONS_OF_DIGIT = {
    "1": (1, 2, 3, 4),
    "2": (1, 3, 4),
    "3": (1, 2, 4),
    "4": (1, 2, 3),
    "5": (1, 4),
    "6": (1, 3),
    "7": (1, 2),
}
"""What each policy keeps. P5 is {S1, S4}, as in the paper's code and in every coverage figure of its table."""

PRINTED_P5 = (2, 3)
CODENAME_KINDS = ("pruning", "subnet")
P5_VARIANTS = ("code", "printed")


def regions(
    view: View, *, codename: str, kind: str = "pruning", p5: str = "code"
) -> Sequence[Reduction]:
    """Give the k-th client of the cohort the k-th digit's policy."""
    check_codename(codename, kind, p5)
    if len(view.cohort) != len(codename):
        raise InvalidValue(
            f"codename {codename} needs a cohort of {len(codename)} clients; this one has {len(view.cohort)}"
        )
    return reductions(view, codename, kind, p5)


def reductions(view: View, codename: str, kind: str, p5: str = "code") -> list[Reduction]:
    """One reduction per digit; equal digits share one."""
    return region_reductions(view, [regions_of_digit(digit, p5) for digit in codename], kind)


def region_reductions(view: View, kept: Sequence[tuple[int, ...]], kind: str) -> list[Reduction]:
    """One reduction per slot, which keeps the named regions of the current weights; equal ones are shared."""
    made: dict[tuple[int, ...], Reduction]
    if kind == "pruning":
        quarters = {
            name: quarter_by_magnitude(view.params[name]) for name in prunable_weights(view)
        }
        made = {
            some: Masks(
                {n: torch.isin(q, torch.tensor(some, device=q.device)) for n, q in quarters.items()}
            )
            for some in set(kept)
        }
    else:
        made = {some: _subnet(view.groups, some) for some in set(kept)}
    return [made[some] for some in kept]


def regions_of_digit(digit: str, p5: str = "code") -> tuple[int, ...]:
    """The regions that a policy keeps.

    >>> regions_of_digit("5"), regions_of_digit("5", "printed")
    ((1, 4), (2, 3))
    """
    return PRINTED_P5 if (digit, p5) == ("5", "printed") else REGIONS_OF_DIGIT[digit]


def region_coverage(codename: str, p5: str = "code") -> dict[str, int]:
    """How many slots of a codename train each region: the closed form.

    >>> region_coverage("1111223344")
    {'S1': 10, 'S2': 8, 'S3': 8, 'S4': 8}
    """
    return {
        f"S{r}": sum(r in regions_of_digit(digit, p5) for digit in codename) for r in (1, 2, 3, 4)
    }


def check_codename(codename: str, kind: str, p5: str = "code") -> None:
    """Refuse what is no codename."""
    if not codename or set(codename) - set(REGIONS_OF_DIGIT):
        raise InvalidValue(
            f"codename must consist of digits 1 to 7, one per slot; got {codename!r}"
        )
    if kind not in CODENAME_KINDS:
        raise unknown("kind", kind, CODENAME_KINDS)
    if p5 not in P5_VARIANTS:
        raise unknown("p5", p5, P5_VARIANTS)


def codename_capacities(codename: str) -> tuple[float, ...]:
    """The share that every slot of a codename holds.

    >>> codename_capacities("147")
    (1.0, 0.75, 0.5)
    """
    return tuple(len(REGIONS_OF_DIGIT[digit]) / 4 for digit in codename)


def quarter_by_magnitude(weight: Tensor) -> Tensor:
    """1 for the largest quarter of the weights, ... 4 for the smallest."""
    return rank_by_magnitude(weight) * 4 // weight.numel() + 1


def _subnet(groups: tuple[UnitGroup, ...], kept: tuple[int, ...]) -> Slices:
    def units(group: UnitGroup) -> Tensor:
        quarters = [torch.arange((r - 1) * group.size // 4, r * group.size // 4) for r in kept]
        chosen = (
            torch.cat(quarters) if sum(map(len, quarters)) else torch.zeros(1, dtype=torch.int64)
        )
        return torch.arange(len(chosen)) if group.nested else chosen

    return Slices(groups, {group.name: units(group) for group in groups})
