"""The description of one run: validated, immutable, readable from TOML and written to it."""

import hashlib
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedcover import registry
from fedcover.data.augment import AUGMENTATIONS
from fedcover.data.client_data import RemoteData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue, unknown
from fedcover.fleet import Fleet
from fedcover.models import MODELS
from fedcover.models.norms import NORMS
from fedcover.policies import POLICIES
from fedcover.policies.paper_regions import check_codename, codename_capacities
from fedcover.runs import presets, toml_fields, trust
from fedcover.server.aggregation import RULES, UNCOVERED, WEIGHTS
from fedcover.server.averaging import AVERAGES
from fedcover.server.evaluation import MODES
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY, check_clip
from fedcover.training.recipes import RECIPES
from fedcover.training.recipes.label_masking import ABSENT_LABELS
from fedcover.training.schedules import SCHEDULES

MAX_INT, MAX_FLOAT = 1_000_000_000, 1e30
"""Larger numbers are typing errors, and torch could not handle them."""

_NAMES: dict[str, Any] = {
    "weights": WEIGHTS,
    "uncovered": UNCOVERED,
    "absent_labels": ABSENT_LABELS,
    "norm": NORMS,
    "evaluation": MODES,
    "augment": AUGMENTATIONS,
}
"""Fields that hold a plain name, and the names they allow."""

_SPECS: dict[str, Any] = {
    "policy": POLICIES,
    "model": MODELS,
    "partition": {**PARTITIONS, "nodes": RemoteData},
    "schedule": SCHEDULES,
    "recipe": RECIPES,
    "rule": RULES,
    "server": SERVERS,
    "average": AVERAGES,
    "privacy": PRIVACY,
}
"""Fields that hold a name with options, such as `rolling(spread=true)`, and their tables."""

_NOT_IDENTITY = {"name", "checkpoint_every", "keep_rounds"}
"""Fields that do not change what is computed."""

_ADDED_FIELDS = ("average",)
"""Fields that earlier versions lack: at its default, such a field is no part of the digest."""


class Experiment(BaseModel):
    """One run, described completely; the defaults are the paper's.

    `preset` names a system whose fields are filled in: `Experiment(preset="heterofl")`.
    docs/experiment.md describes every field in detail.

    Args:
        name: Name of the run folder.
        seed: Seed of all randomness.
        dataset: A data set's name, a file, or `package.module:function`.
        partition: How the rows are divided among the clients.
        validation: Share of the training rows held out for validation.
        calibration: Training rows that norm statistics are computed on for evaluation.
        augment: Augmentation of the training images.
        clients: Number of registered clients.
        active: Number of clients in a round.
        fleet: How many devices of which capacity, such as `4x1.0 + 6x0.75`.
        assignment: Whether a capacity belongs to a device or to a slot of the cohort.
        capacity: Whether a capacity is a share of the width or of the parameters.
        drop_out: Probability that a client of the cohort never answers.
        model: A model's name with options, or `package.module:function`.
        norm: Kind of norm layers and their statistics.
        scaler: Whether to use HeteroFL's scaler.
        policy: Which part of the model each client trains.
        recipe: What a local step is.
        absent_labels: What happens to the logits of labels that a client lacks.
        label_rows: Whether classifier rows of absent labels count as not trained.
        rule: How updates are aggregated.
        weights: How much a client counts in the aggregation.
        uncovered: What becomes of parameters that no client trained.
        server: Optimiser of the server.
        average: Mean of the model over rounds, kept beside the model itself.
        clip_updates: Largest norm of a client's update.
        privacy: Mechanism of client-level differential privacy.
        rounds: Number of rounds.
        epochs: Local epochs in a round.
        batch_size: Local batch size.
        lr: Learning rate.
        schedule: Learning rate schedule, by round.
        momentum: Local momentum, reset in every round.
        weight_decay: Local weight decay.
        clip: Largest norm of a gradient.
        window: Rounds over which `gamma_window` counts.
        evaluation: Which norm statistics the evaluation uses.
        evaluate_every: Rounds between evaluations of the global model.
        local_every: Rounds between evaluations of the clients' own models.
        checkpoint_every: Rounds between checkpoints.
        keep_rounds: Rounds whose initial state is kept for good.

    Raises:
        InvalidValue: If a field is unknown or its value is not allowed.

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
    average: str = "none"
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
            raise InvalidValue(_first_error(error)) from None

    @field_validator("name", mode="before")
    @classmethod
    def _name_to_text(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if is_number else value

    @field_validator("fleet")
    @classmethod
    def _normalize_fleet(cls, value: str) -> str:
        return str(Fleet.parse(value))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_codename(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Fill in the fleet of a codename, which says what every slot holds."""
        policy = registry.parse("policy", str(data.get("policy", "full")))
        if policy.name != "regions" or "codename" not in policy.options:
            return data
        codename = str(policy.options["codename"])
        kind, p5 = policy.options.get("kind", "pruning"), policy.options.get("p5", "code")
        check_codename(codename, str(kind), str(p5))
        if isinstance(data.get("fleet"), str):
            data = {**data, "fleet": str(Fleet.parse(data["fleet"]))}
        implied = {
            "fleet": _fleet_of_codename(codename),
            "assignment": "slot",
            "active": len(codename),
        }
        for field, value in implied.items():
            if data.get(field, value) != value:
                raise ValueError(
                    f"{field} follows from the codename ({value!r}): leave it out; "
                    f"got {data[field]!r}"
                )
        return {**data, **implied}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Fill in the fields of a preset; pydantic runs the last before-validator first."""
        return presets.expand_preset(data)

    @model_validator(mode="after")
    def _check_consistency(self) -> "Experiment":
        trust.trust_fields(self.__dict__)
        for field, table in _NAMES.items():
            if getattr(self, field) not in table:
                raise unknown(field, getattr(self, field), table)
        for field, table in _SPECS.items():
            registry.look_up(field, registry.parse(field, getattr(self, field)), table)
        self._check_clients()
        self._check_privacy()
        if any(not 0 <= round <= self.rounds for round in self.keep_rounds):
            raise ValueError(
                f"keep_rounds must lie in 0..rounds ({self.rounds}); got {list(self.keep_rounds)}"
            )
        return self

    def _check_clients(self) -> None:
        """Check that there are enough clients for a cohort and for every kind of device."""
        if self.active > self.clients:
            is_default = self.active == Experiment.model_fields["active"].default
            raise ValueError(
                f"active must be at most clients ({self.clients}); "
                f"got {self.active}{', the default' if is_default else ''}"
            )
        missing = set(Fleet.parse(self.fleet).levels) - set(self.scaled_fleet.levels)
        if missing:
            members = "clients" if self.assignment == "device" else "slots"
            raise ValueError(
                f"fleet: with {sum(self.scaled_fleet.counts)} {members} no device of capacity "
                f"{min(missing):g} is left; got {self.fleet!r}"
            )

    def _check_privacy(self) -> None:
        """Check what privacy needs: the noise fits clipped updates in an unweighted mean."""
        spec = registry.parse("privacy", self.privacy)
        if spec.name == "none":
            return
        if spec.name in PRIVACY:
            registry.look_up("privacy", spec, PRIVACY)()  # raises if its options are invalid
        needs = {
            "clip_updates": (
                self.clip_updates is not None,
                "a length to which updates are clipped",
            ),
            "rule": (self.rule == "coverage_mean", "coverage_mean without options"),
            "weights": (self.weights == "uniform", "uniform"),
            "label_rows": (not self.label_rows, "false (it shows which labels a client has)"),
        }
        for field, (satisfied, requirement) in needs.items():
            if not satisfied:
                raise ValueError(
                    f"{field} must be {requirement} with privacy; got {getattr(self, field)!r}"
                )
        check_clip(self.clip_updates or 0.0)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that two experiments share only if they compute the same."""
        defaults = {
            field
            for field in _ADDED_FIELDS
            if getattr(self, field) == Experiment.model_fields[field].default
        }
        identity = self.model_dump(mode="json", exclude=_NOT_IDENTITY | defaults)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def scaled_fleet(self) -> Fleet:
        """The fleet with one device for each client, or for each slot of the cohort."""
        return Fleet.parse(self.fleet).scaled(
            self.clients if self.assignment == "device" else self.active
        )

    def to_toml(self) -> str:
        """Return the experiment as TOML, with every field written out.

        Returns:
            A text that `from_toml` reads.

        >>> experiment = Experiment(policy="prefix")
        >>> Experiment.from_toml(experiment.to_toml()) == experiment
        True
        """
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, changes: Mapping[str, Any] | None = None) -> "Experiment":
        """Read an experiment from a TOML text.

        Args:
            text: The TOML text.
            changes: Values that replace fields before anything is checked.

        Returns:
            The experiment.

        Raises:
            InvalidValue: If the text is not TOML, or a field is not allowed.
        """
        return cls(**presets.apply_changes(toml_fields.parse_toml(text), changes or {}))


def read_experiment(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """Read the experiment in a TOML file; `changes` replace fields before the checks.

    The functions that it names are imported.
    """
    return Experiment(**presets.apply_changes(toml_fields.read_fields(path), changes or {}))


def _fleet_of_codename(codename: str) -> str:
    runs = groupby(codename_capacities(codename))
    return " + ".join(f"{len(list(run))}x{capacity:g}" for capacity, run in runs)


def _first_error(error: ValidationError) -> str:
    """Describe the first mistake in one sentence: the field, the rule and the value."""
    details = error.errors()[0]
    field = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return str(unknown("an experiment's field", field, [*Experiment.model_fields, "preset"]))
    message = str(details["msg"]).removeprefix("Value error, ")
    if not field or details["type"] == "value_error":
        return message
    return f"{field}: {message[0].lower()}{message[1:]}; got {details['input']!r}"
