"""The paper's designs: four regions S1-S4, seven policies P1-P7, and codenames with one per slot.

Zhou, Lan, Venkataramani, Ding: Every Parameter Matters (NeurIPS 2023), appendix. With pruning, S1
is the largest quarter of each prunable layer's weights and S4 the smallest. With sub-networks, the
regions are the quarters of every group's units, in order.
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
"""The regions that each policy keeps.

P5 is {S1, S4}, as in the paper's code and in every coverage number of its table.
"""

PRINTED_P5 = (2, 3)
CODENAME_KINDS = ("pruning", "subnet")
P5_VARIANTS = ("code", "printed")


def regions(
    view: View, *, codename: str, kind: str = "pruning", p5: str = "code"
) -> Sequence[Reduction]:
    """Give the k-th client of the cohort the policy of the codename's k-th digit."""
    check_codename(codename, kind, p5)
    if len(view.cohort) != len(codename):
        raise InvalidValue(
            f"codename {codename} needs a cohort of {len(codename)} clients; "
            f"this one has {len(view.cohort)}"
        )
    return reductions(view, codename, kind, p5)


def reductions(view: View, codename: str, kind: str, p5: str = "code") -> list[Reduction]:
    """Return one reduction per digit; equal digits share one."""
    return region_reductions(view, [regions_of_digit(digit, p5) for digit in codename], kind)


def region_reductions(
    view: View, regions_by_slot: Sequence[tuple[int, ...]], kind: str
) -> list[Reduction]:
    """Return one reduction per slot that keeps the slot's regions of the current weights.

    Slots with the same regions share one reduction.
    """
    reduction_of: dict[tuple[int, ...], Reduction]
    if kind == "pruning":
        quarters = {
            name: quarter_by_magnitude(view.params[name]) for name in prunable_weights(view)
        }
        reduction_of = {
            regions: _keep_quarters(quarters, regions) for regions in set(regions_by_slot)
        }
    else:
        reduction_of = {
            regions: _keep_units(view.groups, regions) for regions in set(regions_by_slot)
        }
    return [reduction_of[regions] for regions in regions_by_slot]


def regions_of_digit(digit: str, p5: str = "code") -> tuple[int, ...]:
    """Return the regions that a digit's policy keeps.

    >>> regions_of_digit("5"), regions_of_digit("5", "printed")
    ((1, 4), (2, 3))
    """
    return PRINTED_P5 if (digit, p5) == ("5", "printed") else REGIONS_OF_DIGIT[digit]


def region_coverage(codename: str, p5: str = "code") -> dict[str, int]:
    """Return how many slots of a codename train each region, in closed form.

    >>> region_coverage("1111223344")
    {'S1': 10, 'S2': 8, 'S3': 8, 'S4': 8}
    """
    regions_by_slot = [regions_of_digit(digit, p5) for digit in codename]
    return {
        f"S{region}": sum(region in regions for regions in regions_by_slot)
        for region in (1, 2, 3, 4)
    }


def check_codename(codename: str, kind: str, p5: str = "code") -> None:
    """Raise `InvalidValue` for an invalid codename, kind, or variant of P5."""
    if not codename or set(codename) - set(REGIONS_OF_DIGIT):
        raise InvalidValue(
            f"codename must consist of digits 1 to 7, one per slot; got {codename!r}"
        )
    if kind not in CODENAME_KINDS:
        raise unknown("kind", kind, CODENAME_KINDS)
    if p5 not in P5_VARIANTS:
        raise unknown("p5", p5, P5_VARIANTS)


def codename_capacities(codename: str) -> tuple[float, ...]:
    """Return the share of the model that every slot of a codename holds.

    >>> codename_capacities("147")
    (1.0, 0.75, 0.5)
    """
    return tuple(len(REGIONS_OF_DIGIT[digit]) / 4 for digit in codename)


def quarter_by_magnitude(weight: Tensor) -> Tensor:
    """Return the quarter of every weight: 1 for the largest weights, 4 for the smallest."""
    return rank_by_magnitude(weight) * 4 // weight.numel() + 1


def _keep_quarters(quarters: dict[str, Tensor], regions: tuple[int, ...]) -> Masks:
    bits: dict[str, Tensor] = {}
    for name, quarter in quarters.items():
        bits[name] = torch.isin(quarter, torch.tensor(regions, device=quarter.device))
    return Masks(bits)


def _keep_units(groups: tuple[UnitGroup, ...], regions: tuple[int, ...]) -> Slices:
    return Slices(groups, {group.name: _units_in_quarters(group, regions) for group in groups})


def _units_in_quarters(group: UnitGroup, regions: tuple[int, ...]) -> Tensor:
    """Return the units in the kept quarters of a group, at least one."""
    quarters = [torch.arange((r - 1) * group.size // 4, r * group.size // 4) for r in regions]
    if any(len(quarter) for quarter in quarters):
        units = torch.cat(quarters)
    else:  # quarters of a group of fewer than four units can be empty
        units = torch.zeros(1, dtype=torch.int64)
    if group.nested:  # only the first units can be kept
        return torch.arange(len(units))
    return units
