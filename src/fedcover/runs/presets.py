"""The named systems as fields of an experiment, such as `preset = "heterofl"`.

A preset sets what makes the system, and nothing else. How clients train (rounds, epochs, learning
rate, momentum) and the fleet are left to the user, so that systems can be compared.
docs/systems.md says what each shares with its original.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcover.errors import unknown

SYSTEM: Mapping[str, Any] = {
    "policy": "full",
    "recipe": "plain",
    "scaler": False,
    "absent_labels": "free",
    "label_rows": False,
    "rule": "coverage_mean",
    "weights": "uniform",
    "uncovered": "keep",
    "server": "none",
    "norm": "batch",
    "clip": None,
}
"""The fields that make a system, with the defaults that hold where a preset sets nothing."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A system: its description, and the fields in which it differs from plain averaging."""

    about: str
    changed: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """All fields that the preset sets."""
        return {**SYSTEM, **self.changed}


_HETEROFL = {"scaler": True, "absent_labels": "zero", "label_rows": True, "clip": 1.0}
_EXITS = {"policy": "prefix", "norm": "tracked", "model": "depth_resnet"}
_FIARSE_POLICY = "magnitude(scope='model')"
_FIARSE_RULE = "coverage_mean(over='moved')"

PRESETS: dict[str, Preset] = {
    "heterofl": Preset(
        "nested sub-networks, scaler, masked loss",
        {"policy": "prefix", **_HETEROFL},
    ),
    "fedrolex": Preset(
        "HeteroFL with a window that moves every round",
        {"policy": "rolling", **_HETEROFL},
    ),
    "feddropout": Preset(
        "Federated Dropout: random units for each client and round",
        {"policy": "random"},
    ),
    "fjord": Preset(
        "a width for every batch, taught by the widest; clients count by samples",
        {"policy": "prefix", "recipe": "fjord(distil=1.0)", "weights": "samples"},
    ),
    "prunefl": Preset(
        "one pruned model for all, chosen anew by gradients and time",
        {"policy": "prunefl", "recipe": "prunefl", "uncovered": "zero", "weights": "samples"},
    ),
    "hermes": Preset("every client prunes itself and keeps its mask", {"recipe": "hermes"}),
    "fedmask": Preset("only masks are learned; needs a large lr, such as 1", {"recipe": "fedmask"}),
    "fiarse": Preset(
        "the largest weights, looked up again at every step",
        {"policy": _FIARSE_POLICY, "recipe": "fiarse", "rule": _FIARSE_RULE},
    ),
    "depthfl": Preset(
        "the first stages of a network, exits teach each other",
        {"recipe": "depthfl", **_EXITS},
    ),
    "inclusivefl": Preset(
        "the first stages of a network, only the last exit learns",
        {"recipe": "depthfl(exits='last')", **_EXITS},
    ),
    "fedavg": Preset(
        "every client trains the whole model; clients count by samples",
        {"weights": "samples"},
    ),
    "fedprox": Preset(
        "FedAvg whose clients stay near what they were sent",
        {"recipe": "prox", "weights": "samples"},
    ),
    "fedavgm": Preset(
        "FedAvg with momentum on the server",
        {"server": "momentum", "weights": "samples"},
    ),
    "fedadam": Preset(
        "FedAvg with Adam on the server",
        {"server": "adam", "weights": "samples"},
    ),
}


def preset_fields(name: object) -> dict[str, Any]:
    """Return the fields that a preset sets.

    >>> preset_fields("feddropout")["policy"]
    'random'
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name].fields


def expand_preset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a preset among the fields by what it sets; the other fields override that.

    >>> fields = expand_preset({"preset": "feddropout", "clip": 1.0})
    >>> fields["policy"], fields["clip"], fields["name"], "preset" in fields
    ('random', 1.0, 'feddropout', False)
    """
    if "preset" not in fields:
        return dict(fields)
    preset = fields["preset"]
    other_fields = {field: value for field, value in fields.items() if field != "preset"}
    return {"name": preset, **preset_fields(preset), **other_fields}


def apply_changes(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with changes; a new preset replaces every field that makes a system.

    >>> apply_changes({"policy": "full", "lr": 0.1}, {"preset": "feddropout"})
    {'lr': 0.1, 'preset': 'feddropout'}
    """
    replaced = set()
    if "preset" in changes:
        replaced = {"preset", *preset_fields(changes["preset"])}
    remaining = {field: value for field, value in fields.items() if field not in replaced}
    return {**remaining, **changes}
