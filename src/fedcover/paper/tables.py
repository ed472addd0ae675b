"""Check the paper's printed tables: costs and coverage of codenames, and contradictions."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from fedcover.analysis.audit import audit_codename
from fedcover.paper.claims import CodenameRow, codename_rows, codenames, main_rows
from fedcover.policies.paper_regions import CODENAME_KINDS, codename_capacities, region_coverage

INPUTS, HIDDEN, CLASSES = 784, 200, 10
SHARES = (1.0, 0.75, 0.5)
_APPENDIX_COLUMNS = {"iid": "iid", "L2": "non_iid_global"}


@dataclass(frozen=True)
class CodenameMetrics:
    """Mean parameters and multiply-adds of a codename's clients, and its coverage."""

    parameters: float
    multiply_adds: float
    gamma: int


def closed_form(codename: str, kind: str, p5: str = "code") -> CodenameMetrics:
    """Compute the metrics of a codename by hand for the perceptron 784-200-10.

    Pruning removes quarters of the first layer's weights; a sub-network removes quarters of the
    hidden units.

    >>> closed_form("1444777777", "pruning")
    CodenameMetrics(parameters=100210.0, multiply_adds=100000.0, gamma=1)
    """
    mean_share = sum(codename_capacities(codename)) / len(codename)
    first_layer = INPUTS * HIDDEN
    if kind == "pruning":
        weights = mean_share * first_layer + HIDDEN * CLASSES
        parameters = weights + HIDDEN + CLASSES
    else:
        weights = mean_share * HIDDEN * (INPUTS + CLASSES)
        parameters = weights + mean_share * HIDDEN + CLASSES
    return CodenameMetrics(
        round(parameters, 6), round(weights, 6), min(region_coverage(codename, p5).values())
    )


def measured_metrics(codename: str, kind: str, p5: str = "code") -> CodenameMetrics:
    """Count the same metrics on a model after the policy has made its masks or slices."""
    report = audit_codename(codename, kind, p5)
    return CodenameMetrics(report["parameters"], report["multiply_adds"], report["gamma_min"])


def audit_tables() -> dict[str, Any]:
    """Return each codename as printed, measured and in closed form, with all contradictions."""
    rows = [_row(kind, printed) for kind in CODENAME_KINDS for printed in codename_rows(kind)]
    return {
        "rows": rows,
        "equal_to_closed_form": all(row["measured"] == row["closed_form"] for row in rows),
        "contradictions": [
            *_other_p5(),
            *_cut_off_shares(),
            *_repeated_accuracies(),
            *_same_run_twice(),
            *_main_against_appendix(),
        ],
    }


def _row(kind: str, printed: CodenameRow) -> dict[str, Any]:
    computed = closed_form(printed.codename, kind)
    full_model = closed_form("1", kind)
    devices = tuple(codename_capacities(printed.codename).count(share) for share in SHARES)
    figures = asdict(computed)
    shares = {
        "parameter_share": computed.parameters / full_model.parameters,
        "multiply_add_share": computed.multiply_adds / full_model.multiply_adds,
    }
    wrong_figures = [name for name, value in figures.items() if getattr(printed, name) != value]
    # some printed shares are cut off after two digits, some are rounded: 0.01 away is wrong
    wrong_shares = [
        name for name, share in shares.items() if abs(getattr(printed, name) - share) >= 0.01
    ]
    wrong_devices = ["devices"] if printed.devices != devices else []
    return {
        "table": kind,
        "codename": printed.codename,
        "printed": {name: getattr(printed, name) for name in (*figures, *shares)},
        "shares": shares,
        "measured": asdict(measured_metrics(printed.codename, kind)),
        "closed_form": figures,
        "wrong": [*wrong_figures, *wrong_shares, *wrong_devices],
    }


def _other_p5() -> list[str]:
    """Name rows whose coverage agrees with policy 5 of the code, but not with that of the text."""
    codenames_of_code = [
        row.codename
        for row in codename_rows("pruning")
        if row.gamma
        == closed_form(row.codename, "pruning").gamma
        != closed_form(row.codename, "pruning", "printed").gamma
    ]
    return [
        f"P5 is printed as {{S2, S3}}; the coverage of {len(codenames_of_code)} rows "
        f"of the pruning table ({', '.join(codenames_of_code)}) "
        "holds only with {S1, S4}, which is what the public code does"
    ]


def _cut_off_shares() -> list[str]:
    """Count printed shares that are cut off where rounding gives another number."""
    num_rows = num_cut_off = 0
    for kind in CODENAME_KINDS:
        all_parameters = closed_form("1", kind).parameters
        for row in codename_rows(kind):
            share = closed_form(row.codename, kind).parameters / all_parameters
            num_rows += 1
            num_cut_off += row.parameter_share == int(100 * share) / 100 != round(share, 2)
    return [
        f"{num_cut_off} of {num_rows} shares of parameters are cut off after two digits, "
        "not rounded"
    ]


def _repeated_accuracies() -> list[str]:
    """Name different codenames of one table with the same two non-IID accuracies."""
    sentences = []
    for kind in CODENAME_KINDS:
        codenames_by_accuracies: dict[tuple[float, float], list[str]] = defaultdict(list)
        for row in codename_rows(kind):
            accuracies = row.non_iid_global, row.non_iid_local
            codenames_by_accuracies[accuracies].append(row.codename)
        sentences += [
            f"{' and '.join(names)} ({kind}) have the same non-IID accuracies, {first} and {second}"
            for (first, second), names in codenames_by_accuracies.items()
            if len(names) > 1
        ]
    return sentences


def _same_run_twice() -> list[str]:
    """Compare FedAvg in both tables: it is one run, so its accuracies should agree."""
    fedavg_rows = [
        next(row for row in codename_rows(kind) if set(row.codename) == {"1"})
        for kind in CODENAME_KINDS
    ]
    first, second = (
        f"{row.iid} / {row.non_iid_global} / {row.non_iid_local}" for row in fedavg_rows
    )
    return [
        f"{fedavg_rows[0].codename} is one run, but its accuracies are {first} in one table "
        f"and {second} in the other"
    ]


def _main_against_appendix() -> list[str]:
    """Name MNIST cells of the main table that differ from the appendix row of their design."""
    return list(
        chain.from_iterable(
            _against(row.level, row.setting, column, row.accuracy["mnist"][column])
            for row in main_rows()
            for column in _APPENDIX_COLUMNS
        )
    )


def _against(level: str, setting: str, column: str, printed: float) -> list[str]:
    if setting == "homogeneous":
        return []
    names = ("1111111111",) if level == "full" else codenames(level, setting)
    kinds = [kind for kind in CODENAME_KINDS if level == "full" or setting.startswith(kind)]
    accuracy_by_row = {
        f"{row.codename} ({kind})": getattr(row, _APPENDIX_COLUMNS[column])
        for kind in kinds
        for row in codename_rows(kind)
        if row.codename in names
    }
    if printed in accuracy_by_row.values():
        return []
    rows = ", ".join(f"{accuracy} for {row}" for row, accuracy in accuracy_by_row.items())
    appendix = rows or f"no row {' or '.join(names)}"
    other_places = _places_of(printed)
    elsewhere = f", and {printed} as {', '.join(other_places)}" if other_places else ""
    return [
        f"main table, {level}, {setting}, {column}: {printed}; "
        f"the appendix has {appendix}{elsewhere}"
    ]


def _places_of(value: float) -> list[str]:
    """Return where in the appendix an accuracy is printed."""
    columns = {"iid": "IID", "non_iid_global": "non-IID, global", "non_iid_local": "non-IID, local"}
    return [
        f"{row.codename} ({kind}, {name})"
        for kind in CODENAME_KINDS
        for row in codename_rows(kind)
        for column, name in columns.items()
        if getattr(row, column) == value
    ]
