"""The paper's printed numbers, and the design that each row of its main table describes."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

DATASETS = ("mnist", "cifar10", "cifar100")
LEVELS = ("full", "low", "medium", "high")
SETTINGS = (
    "full",
    "pruning-greedy",
    "pruning-optimised",
    "subnet-static",
    "subnet-optimised",
    "homogeneous",
)
COLUMNS = {
    "mnist": ("iid", "L5", "L2"),
    "cifar10": ("iid", "L5", "L2"),
    "cifar100": ("iid", "L50", "L20"),
}
"""The columns of the main table: IID data, then limits on the labels per client."""

CODENAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("low", "greedy"): ("1111114444",),
    ("low", "optimised"): ("1111112344",),
    ("medium", "greedy"): ("1111444444",),
    ("medium", "optimised"): ("1111223344",),
    ("high", "greedy"): ("1114777777", "1444777777"),
    ("high", "optimised"): ("1114556677", "1234556677"),
}
"""The MLP's designs by level. Two fleets fit the printed high level, so both are run."""


@dataclass(frozen=True)
class MainRow:
    """A row of the main table: coverage, and accuracies in percent by data set and column."""

    level: str
    setting: str
    gamma: int
    accuracy: dict[str, dict[str, float]]


@dataclass(frozen=True)
class CodenameRow:
    """A row of an appendix table. Shares refer to the full model; accuracies are in percent."""

    codename: str
    devices: tuple[int, int, int]
    parameters: int
    multiply_adds: int
    gamma: int
    parameter_share: float
    multiply_add_share: float
    iid: float
    non_iid_global: float
    non_iid_local: float


@cache
def _claims_toml() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((files("fedcover.paper") / "claims.toml").read_text(encoding="utf-8"))


@cache
def main_rows() -> tuple[MainRow, ...]:
    """Return the rows of the main table from top to bottom.

    >>> main_rows()[0].accuracy["mnist"]
    {'iid': 98.08, 'L5': 97.7, 'L2': 93.59}
    """
    return tuple(
        MainRow(
            row["level"],
            row["setting"],
            row["gamma"],
            {
                dataset: dict(zip(columns, row[dataset], strict=True))
                for dataset, columns in COLUMNS.items()
            },
        )
        for row in _claims_toml()["main"]
    )


@cache
def codename_rows(kind: str) -> tuple[CodenameRow, ...]:
    """Return the rows of the appendix table of `pruning` or `subnet`.

    >>> codename_rows("subnet")[2].gamma
    6
    """
    return tuple(_codename_row(row) for row in _claims_toml()[kind])


def _codename_row(row: dict[str, Any]) -> CodenameRow:
    field_of_key = {"global": "non_iid_global", "local": "non_iid_local"}
    fields = {field_of_key.get(key, key): value for key, value in row.items()}
    return CodenameRow(**fields | {"devices": tuple(row["devices"])})


def claimed_accuracy(dataset: str, column: str, level: str, setting: str) -> float | None:
    """Return an accuracy of the main table in percent, or None if it has no such entry."""
    for row in main_rows():
        if (row.level, row.setting) == (level, setting):
            return row.accuracy[dataset].get(column)
    return None


def codenames(level: str, setting: str) -> tuple[str, ...]:
    """Return the codenames of a setting of the main table with the MLP.

    Homogeneous models have none.

    >>> codenames("high", "subnet-static")
    ('1114777777', '1444777777')
    """
    selection = setting.partition("-")[2].replace("static", "greedy")
    return CODENAMES.get((level, selection), ())
