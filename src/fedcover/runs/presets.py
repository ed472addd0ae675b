"""The named systems as fields of an experiment: `preset = "heterofl"` sets what makes the system, and nothing else.

How clients train (rounds, epochs, learning rate, momentum) and over which fleet is left to the user, so that systems
can be compared. docs/systems.md says what each shares with its original.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcover.errors import unknown

SYSTEM: Mapping[str, Any] = {
    "policy": "full", "recipe": "plain", "scaler": False, "absent_labels": "free", "label_rows": False,
    "rule": "coverage_mean", "weights": "uniform", "uncovered": "keep", "server": "none", "norm": "batch", "clip": None,
}  # fmt: skip
"""The fields that make a system, as they are where a preset says nothing else: the defaults of an experiment."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A system: in which words it is listed, and in which fields it differs from plain averaging."""

    about: str
    changed: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """All that the preset sets."""
        return {**SYSTEM, **self.changed}


_BY_LABELS = {"scaler": True, "absent_labels": "zero", "label_rows": True, "clip": 1.0}
_EXITS = {"policy": "prefix", "norm": "tracked", "model": "depth_resnet"}

PRESETS: dict[str, Preset] = {
    "heterofl": Preset("nested sub-networks, scaler, masked loss", {"policy": "prefix", **_BY_LABELS}),
    "fedrolex": Preset("HeteroFL with a window that moves every round", {"policy": "rolling", **_BY_LABELS}),
    "feddropout": Preset("Federated Dropout: random units for each client and round", {"policy": "random"}),
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
        {"policy": "magnitude(scope='model')", "recipe": "fiarse", "rule": "coverage_mean(over='moved')"},
    ),
    "depthfl": Preset("the first stages of a network, exits teach each other", {"recipe": "depthfl", **_EXITS}),
    "inclusivefl": Preset(
        "the first stages of a network, only the last exit learns", {"recipe": "depthfl(exits='last')", **_EXITS}
    ),
    "fedavg": Preset("everybody trains everything; clients count by samples", {"weights": "samples"}),
    "fedprox": Preset("FedAvg whose clients stay near what they were sent", {"recipe": "prox", "weights": "samples"}),
    "fedavgm": Preset("FedAvg with momentum on the server", {"server": "momentum", "weights": "samples"}),
    "fedadam": Preset("FedAvg with Adam on the server", {"server": "adam", "weights": "samples"}),
}  # fmt: skip


def preset_fields(name: object) -> dict[str, Any]:
    """What a preset sets.

    >>> preset_fields("feddropout")["policy"]
    'random'
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name].fields


def expand_preset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with their preset, if they name one, written out; what stands beside it overrides it.

    >>> made = expand_preset({"preset": "feddropout", "clip": 1.0})
    >>> made["policy"], made["clip"], made["name"], "preset" in made
    ('random', 1.0, 'feddropout', False)
    """
    if "preset" not in fields:
        return dict(fields)
    own = {field: value for field, value in fields.items() if field != "preset"}
    return {"name": fields["preset"], **preset_fields(fields["preset"]), **own}


def apply_changes(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with changes; a preset among these takes the place of all that the fields say of the system.

    >>> apply_changes({"policy": "full", "lr": 0.1}, {"preset": "feddropout"})
    {'lr': 0.1, 'preset': 'feddropout'}
    """
    replaced = {"preset", *preset_fields(changes["preset"])} if "preset" in changes else set()
    return {**{field: value for field, value in fields.items() if field not in replaced}, **changes}
