"""The rows of the main table as designs: who holds what at each level, for the MLP and for the ResNets."""

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
"""The ResNets' fleets, and the regions of every slot in the optimised rows: each region as often as it can be held."""


@dataclass(frozen=True)
class Design:
    """A setting of a level: how it is called, and what it changes in an experiment."""

    level: str
    setting: str
    name: str
    fields: Mapping[str, object]


def designs(dataset: str) -> tuple[Design, ...]:
    """The rows of the main table for a data set; the MLP's high level has two fleets."""
    full = Design("full", "full", "full", {"policy": "full", "fleet": "1x1.0"})
    make = _mlp_designs if dataset == "mnist" else _resnet_designs
    return (
        full,
        *(
            design
            for level in LEVELS[1:]
            for design in [*make(level), _homogeneous(dataset, level)]
        ),
    )


def _mlp_designs(level: str) -> list[Design]:
    return [
        codename_design(level, setting, setting.partition("-")[0], name)
        for setting in SETTINGS[1:5]
        for name in codenames(level, setting)
    ]


def codename_design(level: str, setting: str, kind: str, name: str) -> Design:
    """The design that a codename stands for; of ones only, it is the full model."""
    if set(name) == {"1"}:
        return designs("mnist")[0]
    return Design(
        level, setting, f"{kind}-{name}", {"policy": f"regions(codename='{name}', kind='{kind}')"}
    )


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
    """Our planner with the optimised row's fleet and, where one round can give it, that row's coverage."""
    found = []
    for design in designs(dataset):
        kind, _, manner = design.setting.partition("-")
        if manner != "optimised":
            continue
        wish = (
            f", gamma={aimed_coverage(design)}" if dataset == "mnist" or kind == "pruning" else ""
        )
        fields = {
            "policy": f"planned(kind='{kind}'{wish})",
            "fleet": Experiment(**design.fields).fleet,
            "assignment": "slot",
        }
        found.append(Design(design.level, f"{kind}-planned", f"{design.name}-planned", fields))
    return tuple(found)


def aimed_coverage(design: Design) -> int:
    """How often an optimised design holds every region: its coverage, were every parameter in a single region."""
    slots = re.search(r"slots='([^']*)'", str(design.fields["policy"]))
    return (
        slot_coverage(slots[1])
        if slots
        else min(region_coverage(design.name.partition("-")[2]).values())
    )
