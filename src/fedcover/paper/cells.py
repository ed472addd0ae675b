"""Every number to reproduce, as data: a cell is an entry of a table and its experiment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedcover.errors import unknown
from fedcover.paper.claims import COLUMNS, DATASETS, SETTINGS, codename_rows
from fedcover.paper.designs import Design, codename_design, designs, planned_designs
from fedcover.runs.experiment import Experiment

SETS = ("mnist-pruning", "mnist-subnet", "table1", "figures", "rates")
ROWS = ("main", "appendix", "planned", "public-code", "second-rate", "dirichlet", "rates")
MODEL_OF_DATASET = {
    "mnist": "mlp",
    "cifar10": "wide_resnet(widen=2)",
    "cifar100": "wide_resnet(widen=8)",
}
DIRICHLET_ALPHA = {"mnist": 0.1, "cifar10": 0.1, "cifar100": 0.5}
"""The Dirichlet concentrations that the paper calls equivalent to its label limits."""

RATE = 0.01
RATES = (0.01, 0.03, 0.1, 0.3)
RATE_SEED = 1000
RATE_ROUNDS = {"mnist": 100, "cifar10": 20, "cifar100": 20}
"""Rounds for choosing the second learning rate.

All rates are tried on rows held out from the training set, with a seed of their own.
"""

PUBLIC_CODE = (
    "1111111111", "1111114444", "1111444444", "1111223344",
    "1111234444", "1114556677", "1234556677", "1444777777",
)  # fmt: skip
_SWITCHES = "argsort=true, wrong_net=true, unmasked=true"


@dataclass(frozen=True)
class Cell:
    """One number: its entry in the tables, and its experiment at seed 0."""

    id: str
    dataset: str
    column: str
    level: str
    setting: str
    row: str
    design: str
    experiment: Experiment
    sets: frozenset[str]

    @property
    def score(self) -> str:
        """The metric that counts. A part of the model that is never trained counts as absent."""
        return "accuracy_common" if self.setting == "homogeneous" else "accuracy"

    def seeds(self, count: int) -> tuple[int, ...]:
        """Return the seeds of the cell; learning rates are chosen with a seed of their own."""
        return (RATE_SEED,) if self.row == "rates" else tuple(range(count))

    def with_seed(self, seed: int) -> Experiment:
        """Return the experiment with one seed."""
        return self.experiment.model_copy(update={"seed": seed, "name": f"{self.id}_{seed}"})


def cells(second_rates: Mapping[str, float]) -> tuple[Cell, ...]:
    """Return all cells, the most important first.

    `second_rates` are the other learning rates of the data sets, as far as they are known.

    >>> len({cell.id for cell in cells({})}) == len(cells({}))
    True
    """
    all_cells = [
        *_main(),
        *_appendix(),
        *_rates(),
        *_planned(),
        *_public_code(),
        *_second_rate(second_rates),
        *_dirichlet(),
    ]
    cell_by_id: dict[str, Cell] = {}
    for cell in all_cells:
        first = cell_by_id.setdefault(cell.id, cell)
        cell_by_id[cell.id] = replace(first, sets=first.sets | cell.sets)
    return tuple(cell_by_id.values())


def cell_id(dataset: str, column: str, design: str, suffix: str = "") -> str:
    """Return the name under which a cell's results are stored."""
    return "-".join(word for word in (dataset, column, design, suffix) if word)


def _base(dataset: str, column: str) -> dict[str, object]:
    """Return the fields that the cells of a column share.

    All other fields have the experiment's defaults, which are the paper's values.
    """
    if column == "iid":
        partition = "iid"
    elif column == "dirichlet":
        partition = f"dirichlet(alpha={DIRICHLET_ALPHA[dataset]:g})"
    else:
        partition = f"labels(limit={column.removeprefix('L')})"
    return {
        "dataset": dataset,
        "model": MODEL_OF_DATASET[dataset],
        "partition": partition,
        "lr": RATE,
    }


def _cell(
    dataset: str,
    column: str,
    design: Design,
    row: str,
    sets: Iterable[str],
    suffix: str = "",
    **fields: object,
) -> Cell:
    experiment = Experiment(**{**_base(dataset, column), **design.fields, **fields})
    id = cell_id(dataset, column, design.name, suffix)
    return Cell(
        id,
        dataset,
        column,
        design.level,
        design.setting,
        row,
        design.name,
        experiment,
        frozenset(sets),
    )


def _main() -> list[Cell]:
    return [
        _cell(dataset, column, design, "main", _main_sets(dataset, column, design.level))
        for dataset in DATASETS
        for column in COLUMNS[dataset]
        for design in designs(dataset)
    ]


def _main_sets(dataset: str, column: str, level: str) -> set[str]:
    has_figure = dataset == "mnist" and column in ("iid", "L2") and level in ("full", "medium")
    return {"table1", "figures"} if has_figure else {"table1"}


def _appendix() -> list[Cell]:
    return [
        _cell(
            "mnist",
            column,
            codename_design("appendix", kind, kind, row.codename),
            "appendix",
            (f"mnist-{kind}", "figures"),
        )
        for kind in ("pruning", "subnet")
        for row in codename_rows(kind)
        for column in ("iid", "L2")
    ]


def _planned() -> list[Cell]:
    return [
        _cell(dataset, column, design, "planned", ["table1"])
        for dataset in DATASETS
        for column in COLUMNS[dataset]
        for design in planned_designs(dataset)
        if dataset == "mnist" or design.level == "medium"
    ]


def _public_code() -> list[Cell]:
    """Return cells with all departures of the public code, except `leak`, which needs two runs."""
    return [
        _public_code_cell(codename, column) for codename in PUBLIC_CODE for column in ("iid", "L2")
    ]


def _public_code_cell(codename: str, column: str) -> Cell:
    return _cell(
        "mnist",
        column,
        Design("appendix", "pruning", f"pruning-{codename}", {}),
        "public-code",
        ["mnist-pruning"],
        "public",
        policy=f"fedcover.paper.public_code:public_code(codename='{codename}', {_SWITCHES})",
        fleet=Experiment(policy=f"regions(codename='{codename}')").fleet,
        assignment="slot",
        active=len(codename),
        uncovered="zero",
        model="mlp(dropout=0.5)",
    )


def _second_rate(rates: Mapping[str, float]) -> list[Cell]:
    return [
        _cell(
            dataset,
            column,
            design,
            "second-rate",
            ["table1"],
            f"lr{rates[dataset]:g}",
            lr=rates[dataset],
        )
        for dataset in DATASETS
        if dataset in rates
        for column in COLUMNS[dataset]
        for design in designs(dataset)
        if design.level in ("full", "medium")
    ]


def _dirichlet() -> list[Cell]:
    return [
        _cell(dataset, "dirichlet", design, "dirichlet", ["table1"])
        for dataset in DATASETS
        for design in designs(dataset)
        if (design.level, design.setting)
        in {("full", "full"), *(("medium", s) for s in SETTINGS[1:3])}
    ]


def _rates() -> list[Cell]:
    return [
        _cell(
            dataset, "iid", designs(dataset)[0], "rates", ["rates"], f"rate{rate:g}",
            lr=rate, validation=0.1, rounds=RATE_ROUNDS[dataset],
        )
        for dataset in DATASETS
        for rate in RATES
    ]  # fmt: skip


# ── which of them ─────────────────────────────────────────────────────────────────────────────────


AXES = ("dataset", "column", "level", "setting", "row", "seed", "cell")


def select_cells(
    all_cells: Iterable[Cell], sets: Sequence[str], seeds: int, only: Mapping[str, Sequence[str]]
) -> list[tuple[Cell, int]]:
    """Return the cells and seeds of some sets that pass a filter, sorted by seed."""
    for name in sets:
        if name not in SETS:
            raise unknown("reproduce", name, SETS)
    for axis in only:
        if axis not in AXES:
            raise unknown("only", axis, AXES)
    selected = [
        (cell, seed) for cell in all_cells if cell.sets & set(sets) for seed in cell.seeds(seeds)
    ]
    for axis, values in only.items():
        existing_values = {_value(cell, seed, axis) for cell, seed in selected}
        for value in values:
            if value not in existing_values:
                raise unknown(f"only {axis}", value, sorted(existing_values))
        selected = [(cell, seed) for cell, seed in selected if _value(cell, seed, axis) in values]
    return sorted(selected, key=lambda pair: pair[1])


def _value(cell: Cell, seed: int, axis: str) -> str:
    if axis == "seed":
        return str(seed)
    return str(cell.id if axis == "cell" else getattr(cell, axis))
