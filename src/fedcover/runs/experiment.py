"""A frozen, validated description of one run; TOML in and out."""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedcover import registry
from fedcover.data.augment import AUGMENTATIONS
from fedcover.data.client_data import RemoteData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue, unknown
from fedcover.fleet import Fleet
from fedcover.host import disk
from fedcover.models import MODELS
from fedcover.models.norms import NORMS
from fedcover.policies import POLICIES
from fedcover.policies.paper_regions import check_codename, codename_capacities
from fedcover.runs import presets, trust
from fedcover.server.aggregation import RULES, UNCOVERED, WEIGHTS
from fedcover.server.evaluation import MODES
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY, check_clip
from fedcover.training.recipes import RECIPES
from fedcover.training.recipes.label_masking import ABSENT_LABELS
from fedcover.training.schedules import SCHEDULES

MAX_INT, MAX_FLOAT = 1_000_000_000, 1e30
"""Beyond these, numbers are typing errors, and torch would stumble over them."""

_NAMES: dict[str, Any] = {
    "weights": WEIGHTS,
    "uncovered": UNCOVERED,
    "absent_labels": ABSENT_LABELS,
    "norm": NORMS,
    "evaluation": MODES,
    "augment": AUGMENTATIONS,
}
_SPECS: dict[str, Any] = {
    "policy": POLICIES,
    "model": MODELS,
    "partition": {**PARTITIONS, "nodes": RemoteData},
    "schedule": SCHEDULES,
    "recipe": RECIPES,
    "rule": RULES,
    "server": SERVERS,
    "privacy": PRIVACY,
}
_NOT_IDENTITY = {"name", "checkpoint_every", "keep_rounds"}


class Experiment(BaseModel):
    """One run, described completely; the defaults are the paper's. A `preset` stands for the fields of a named system.

    >>> Experiment(dataset="digits", fleet="5x0.5 + 5x0.25", policy="rolling(spread=true)").rounds
    100
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: str = Field("run", max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, le=2**63 - 1)

    dataset: str = "digits"
    partition: str = "iid"
    validation: float = Field(0.0, ge=0, lt=1)
    calibration: int = Field(1000, ge=1, le=MAX_INT)
    augment: str = "none"

    clients: int = Field(100, ge=1, le=MAX_INT)
    active: int = Field(10, ge=1, le=MAX_INT)
    fleet: str = "1x1.0"
    assignment: Literal["device", "slot"] = "device"
    capacity: Literal["width", "parameters"] = "width"
    drop_out: float = Field(0.0, ge=0, lt=1)

    model: str = "mlp"
    norm: str = "batch"
    scaler: bool = False
    policy: str = "full"
    recipe: str = "plain"
    absent_labels: str = "free"
    label_rows: bool = False
    rule: str = "coverage_mean"
    weights: str = "uniform"
    uncovered: str = "keep"
    server: str = "none"
    clip_updates: float | None = Field(None, gt=0, le=MAX_FLOAT, allow_inf_nan=False)
    privacy: str = "none"

    rounds: int = Field(100, ge=1, le=MAX_INT)
    epochs: int = Field(5, ge=1, le=MAX_INT)
    batch_size: int = Field(10, ge=1, le=MAX_INT)
    lr: float = Field(0.01, gt=0, le=MAX_FLOAT, allow_inf_nan=False)
    schedule: str = "constant"
    momentum: float = Field(0.5, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=MAX_FLOAT, allow_inf_nan=False)
    clip: float | None = Field(None, gt=0, allow_inf_nan=False)

    window: int = Field(10, ge=1, le=MAX_INT)
    evaluation: str = "calibrated"
    evaluate_every: int = Field(1, ge=1, le=MAX_INT)
    local_every: int | None = Field(None, ge=1, le=MAX_INT)
    checkpoint_every: int = Field(1, ge=1, le=MAX_INT)
    keep_rounds: tuple[int, ...] = ()

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidValue(_sentence(error)) from None

    @field_validator("name", mode="before")
    @classmethod
    def _number_as_name(cls, value: Any) -> Any:
        return (
            str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        )

    @field_validator("fleet")
    @classmethod
    def _readable_fleet(cls, value: str) -> str:
        return str(Fleet.parse(value))

    @model_validator(mode="before")
    @classmethod
    def _fleet_of_codename(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A codename says what every slot holds, so it brings its own fleet."""
        policy = registry.parse("policy", str(data.get("policy", "full")))
        if policy.name != "regions" or "codename" not in policy.options:
            return data
        codename = str(policy.options["codename"])
        check_codename(
            codename,
            str(policy.options.get("kind", "pruning")),
            str(policy.options.get("p5", "code")),
        )
        kinds = [(len(list(run)), share) for share, run in groupby(codename_capacities(codename))]
        fleet = " + ".join(f"{count}x{share:g}" for count, share in kinds)
        if isinstance(data.get("fleet"), str):
            data = {**data, "fleet": str(Fleet.parse(data["fleet"]))}
        implied = {"fleet": fleet, "assignment": "slot", "active": len(codename)}
        for key, value in implied.items():
            if data.get(key, value) != value:
                raise ValueError(
                    f"{key} follows from the codename ({value!r}): leave it out; got {data[key]!r}"
                )
        return {**data, **implied}

    @model_validator(mode="before")
    @classmethod
    def _fields_of_preset(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A preset is its fields from here on; of the before-validators the last one goes first."""
        return presets.expand_preset(data)

    @model_validator(mode="after")
    def _known_and_consistent(self) -> "Experiment":
        trust.trust_fields(self.__dict__)
        for key, table in _NAMES.items():
            if getattr(self, key) not in table:
                raise unknown(key, getattr(self, key), table)
        for key, table in _SPECS.items():
            registry.look_up(key, registry.parse(key, getattr(self, key)), table)
        if self.active > self.clients:
            default = (
                ", the default" if self.active == Experiment.model_fields["active"].default else ""
            )
            raise ValueError(
                f"active must be at most clients ({self.clients}); got {self.active}{default}"
            )
        gone = set(Fleet.parse(self.fleet).levels) - set(self.scaled_fleet.levels)
        if gone:
            places = "clients" if self.assignment == "device" else "slots"
            raise ValueError(
                f"fleet: with {sum(self.scaled_fleet.counts)} {places} no device of capacity {min(gone):g} is left; "
                f"got {self.fleet!r}"
            )
        self._check_privacy()
        if any(not 0 <= round <= self.rounds for round in self.keep_rounds):
            raise ValueError(
                f"keep_rounds must lie in 0..rounds ({self.rounds}); got {list(self.keep_rounds)}"
            )
        return self

    def _check_privacy(self) -> None:
        """Noise is calibrated to clipped updates that all count the same in a plain mean; nothing else is private."""
        named = registry.parse("privacy", self.privacy)
        if named.name == "none":
            return
        if named.name in PRIVACY:
            registry.look_up("privacy", named, PRIVACY)()  # it refuses its own options
        needs = {
            "clip_updates": (
                self.clip_updates is not None,
                "a length to which updates are clipped",
            ),
            "rule": (self.rule == "coverage_mean", "coverage_mean without options"),
            "weights": (self.weights == "uniform", "uniform"),
            "label_rows": (not self.label_rows, "false (it shows which labels a client has)"),
        }
        for field, (met, wanted) in needs.items():
            if not met:
                raise ValueError(
                    f"{field} must be {wanted} with privacy; got {getattr(self, field)!r}"
                )
        check_clip(self.clip_updates or 0.0)

    @property
    def digest(self) -> str:
        """Sixteen digits that two experiments share only if they compute the same thing."""
        identity = self.model_dump(mode="json", exclude=_NOT_IDENTITY)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def scaled_fleet(self) -> Fleet:
        """The fleet with as many devices as there are clients, or slots."""
        places = self.clients if self.assignment == "device" else self.active
        return Fleet.parse(self.fleet).scaled(places)

    def to_toml(self) -> str:
        """The experiment as TOML, every field written out.

        >>> Experiment.from_toml(Experiment(policy="prefix").to_toml()) == Experiment(policy="prefix")
        True
        """
        fields = self.model_dump(mode="json", exclude_none=True)
        # a JSON string, number, boolean or list of numbers is also TOML (but for surrogates and one control character)
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in fields.items()
        ]
        return "".join(lines).replace("\x7f", "\\u007f")

    @classmethod
    def from_toml(cls, text: str, changes: Mapping[str, Any] | None = None) -> "Experiment":
        """Read an experiment; `changes` replace fields before anything is checked."""
        return cls(**presets.changed(_fields(text), changes or {}))


def _fields(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the experiment is not valid TOML: {error}") from error


def named_after(text: str) -> str:
    """The nearest name that a run can have.

    >>> named_after("my exp (2)"), named_after("€")
    ('my-exp-2', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or "run"


def read_experiment(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment in a TOML file; functions that it names are imported."""
    return Experiment(**presets.changed(read_fields(path), changes or {}))


def read_fields(path: Path) -> dict[str, Any]:
    """The fields in a TOML file, named after the file unless it says otherwise; nothing is checked or imported."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"experiment {path} cannot be read: {disk.reason(error)}") from error
    return parse_fields(text, path.stem)


def parse_fields(text: str, name: str) -> dict[str, Any]:
    """The fields in the text of a TOML file; without a name among them, that of the file."""
    return {"name": named_after(name), **_fields(text)}


def parse_change(text: str) -> tuple[str, Any]:
    """One `--set key=value`; the value is read as TOML where that makes sense, else as a string.

    >>> parse_change("rounds=50"), parse_change("policy=rolling(spread=true)"), parse_change("scaler=true")
    (('rounds', 50), ('policy', 'rolling(spread=true)'), ('scaler', True))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidValue(f"--set must look like key=value; got {text!r}")
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        read = {}
    if len(read) == 1 and isinstance(read["value"], bool | int | float | str | list):
        return key.strip(), read["value"]
    return key.strip(), value.strip()


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, in one sentence that names field, value and what is allowed."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return str(unknown("an experiment's field", field, [*Experiment.model_fields, "preset"]))
    message = str(first["msg"]).removeprefix("Value error, ")
    if not field or first["type"] == "value_error":
        return message
    return f"{field}: {message[0].lower()}{message[1:]}; got {first['input']!r}"
