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

    Pruning removes quarters of the first layer's weights; a sub-network removes quarters of the hidden units.

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
    right, found = closed_form(printed.codename, kind), measured_metrics(printed.codename, kind)
    whole = closed_form("1", kind)
    devices = tuple(codename_capacities(printed.codename).count(share) for share in SHARES)
    wrong = [name for name, value in asdict(right).items() if getattr(printed, name) != value]
    shares = {
        "parameter_share": right.parameters / whole.parameters,
        "multiply_add_share": right.multiply_adds / whole.multiply_adds,
    }
    # the printed shares are cut off after two digits, some are rounded: less than 0.01 away is right
    wrong += [name for name, share in shares.items() if abs(getattr(printed, name) - share) >= 0.01]
    wrong += ["devices"] if printed.devices != devices else []
    return {
        "table": kind,
        "codename": printed.codename,
        "printed": {name: getattr(printed, name) for name in (*asdict(right), *shares)},
        "shares": shares,
        "measured": asdict(found),
        "closed_form": asdict(right),
        "wrong": wrong,
    }


def _other_p5() -> list[str]:
    """Name rows whose coverage agrees with policy 5 of the code, but not with that of the text."""
    rows = codename_rows("pruning")
    broken = [
        row.codename
        for row in rows
        if row.gamma
        == closed_form(row.codename, "pruning").gamma
        != closed_form(row.codename, "pruning", "printed").gamma
    ]
    return [
        f"P5 is printed as {{S2, S3}}; the coverage of {len(broken)} rows of the pruning table ({', '.join(broken)}) "
        "holds only with {S1, S4}, which is what the public code does"
    ]


def _cut_off_shares() -> list[str]:
    """Count printed shares that are cut off where rounding gives another number."""
    rows = [
        (row.parameter_share, closed_form(row.codename, kind), kind)
        for kind in CODENAME_KINDS
        for row in codename_rows(kind)
    ]
    exact = [
        (printed, right.parameters / closed_form("1", kind).parameters)
        for printed, right, kind in rows
    ]
    cut = sum(printed == int(100 * share) / 100 != round(share, 2) for printed, share in exact)
    return [f"{cut} of {len(exact)} shares of parameters are cut off after two digits, not rounded"]


def _repeated_accuracies() -> list[str]:
    """Name different codenames of one table with the same two non-IID accuracies."""
    found = []
    for kind in CODENAME_KINDS:
        alike: dict[tuple[float, float], list[str]] = defaultdict(list)
        for row in codename_rows(kind):
            alike[row.non_iid_global, row.non_iid_local].append(row.codename)
        found += [
            f"{' and '.join(names)} ({kind}) have the same non-IID accuracies, {pair[0]} and {pair[1]}"
            for pair, names in alike.items()
            if len(names) > 1
        ]
    return found


def _same_run_twice() -> list[str]:
    """Compare FedAvg in both tables: it is one run, so its accuracies should agree."""
    first, second = (
        next(r for r in codename_rows(kind) if set(r.codename) == {"1"}) for kind in CODENAME_KINDS
    )
    values = [
        f"{a} / {b} / {c}"
        for a, b, c in ((r.iid, r.non_iid_global, r.non_iid_local) for r in (first, second))
    ]
    return [
        f"{first.codename} is one run, but its accuracies are {values[0]} in one table and {values[1]} in the other"
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
    tables = (
        CODENAME_KINDS
        if level == "full"
        else tuple(k for k in CODENAME_KINDS if setting.startswith(k))
    )
    known = {
        f"{row.codename} ({kind})": getattr(row, _APPENDIX_COLUMNS[column])
        for kind in tables
        for row in codename_rows(kind)
        if row.codename in names
    }
    if printed in known.values():
        return []
    listed = (
        ", ".join(f"{value} for {name}" for name, value in known.items())
        or f"no row {' or '.join(names)}"
    )
    elsewhere = _places_of(printed)
    found = f", and {printed} as {', '.join(elsewhere)}" if elsewhere else ""
    return [
        f"main table, {level}, {setting}, {column}: {printed}; the appendix has {listed}{found}"
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
