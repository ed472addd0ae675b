"""The rows of the main table as designs: what each client holds at each level."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedcover.paper.claims import LEVELS, SETTINGS, codenames
from fedcover.paper.quarters import slot_coverage
from fedcover.policies.paper_regions import region_coverage
from fedcover.runs.experiment import Experiment

HOMOGENEOUS = {
    "mnist": {"low": 0.75, "medium": 0.5, "high": 0.25},
    "cifar10": {"low": 0.5, "medium": 0.25, "high": 0.125},
    "cifar100": {"low": 0.5, "medium": 0.25, "high": 0.125},
}
RESNET_FLEETS = {
    "low": ("6x1.0 + 4x0.5", "1234 " * 6 + "14 23 13 24"),
    "medium": ("4x1.0 + 6x0.5", "1234 " * 4 + "14 23 13 24 12 34"),
    "high": ("3x1.0 + 1x0.5 + 6x0.25", "1234 " * 3 + "12 3 3 4 4 1 2"),
}
"""The ResNets' fleets, and the regions of each slot in the optimised rows.

Each region is held as often as the fleet allows.
"""


@dataclass(frozen=True)
class Design:
    """A setting of a level: its name, and the fields of the experiment that it changes."""

    level: str
    setting: str
    name: str
    fields: Mapping[str, object]


def designs(dataset: str) -> tuple[Design, ...]:
    """Return the rows of the main table for a data set; the MLP's high level has two fleets."""
    rows = [Design("full", "full", "full", {"policy": "full", "fleet": "1x1.0"})]
    for level in LEVELS[1:]:
        rows += _mlp_designs(level) if dataset == "mnist" else _resnet_designs(level)
        rows.append(_homogeneous(dataset, level))
    return tuple(rows)


def _mlp_designs(level: str) -> list[Design]:
    return [
        codename_design(level, setting, setting.partition("-")[0], name)
        for setting in SETTINGS[1:5]
        for name in codenames(level, setting)
    ]


def codename_design(level: str, setting: str, kind: str, name: str) -> Design:
    """Return the design of a codename. If all its digits are 1, it is the full model."""
    if set(name) == {"1"}:
        return designs("mnist")[0]
    policy = f"regions(codename='{name}', kind='{kind}')"
    return Design(level, setting, f"{kind}-{name}", {"policy": policy})


def _resnet_designs(level: str) -> list[Design]:
    fleet, slots = RESNET_FLEETS[level]
    policies = {
        "pruning-greedy": "magnitude",
        "pruning-optimised": f"fedcover.paper.quarters:quarters(slots='{slots}', kind='pruning')",
        "subnet-static": "prefix",
        "subnet-optimised": f"fedcover.paper.quarters:quarters(slots='{slots}', kind='subnet')",
    }
    return [
        Design(
            level,
            setting,
            f"{level}-{setting}",
            {"policy": policy, "fleet": fleet, "assignment": "slot"},
        )
        for setting, policy in policies.items()
    ]


def _homogeneous(dataset: str, level: str) -> Design:
    share = HOMOGENEOUS[dataset][level]
    fields = {"policy": f"homogeneous(share={share:g})", "fleet": "1x1.0", "local_every": 10}
    return Design(level, "homogeneous", f"homogeneous-{share:g}", fields)


def planned_designs(dataset: str) -> tuple[Design, ...]:
    """Return our planner's designs with the fleets of the optimised rows.

    They have the coverage of the optimised row where one round can reach it.
    """
    planned = []
    for design in designs(dataset):
        kind, _, manner = design.setting.partition("-")
        if manner != "optimised":
            continue
        gamma_option = ""
        if dataset == "mnist" or kind == "pruning":
            gamma_option = f", gamma={aimed_coverage(design)}"
        fields = {
            "policy": f"planned(kind='{kind}'{gamma_option})",
            "fleet": Experiment(**design.fields).fleet,
            "assignment": "slot",
        }
        planned.append(Design(design.level, f"{kind}-planned", f"{design.name}-planned", fields))
    return tuple(planned)


def aimed_coverage(design: Design) -> int:
    """Return how often an optimised design holds every region.

    This is its coverage if every parameter belongs to a single region.
    """
    slots = re.search(r"slots='([^']*)'", str(design.fields["policy"]))
    if slots:
        return slot_coverage(slots[1])
    codename = design.name.partition("-")[2]
    return min(region_coverage(codename).values())
