"""The paper's printed numbers: read as they stand, worked out anew, and what is wrong with them."""

import json

import pytest

from fedcover.analysis.audit import audit
from fedcover.errors import InvalidValue
from fedcover.paper import tables
from fedcover.paper.claims import COLUMNS, claimed_accuracy, codename_rows, codenames, main_rows
from fedcover.paper.designs import RESNET_FLEETS, aimed_coverage, designs
from fedcover.paper.tables import CodenameMetrics, audit_tables, closed_form
from fedcover.policies.paper_regions import codename_capacities
from fedcover.runs.experiment import Experiment
from tests.helpers.paper_tables import PRUNING, SUBNET


@pytest.fixture(scope="module")
def audited():
    return audit_tables()


def test_printed_tables_have_all_rows_and_columns():
    assert len(main_rows()) == 16
    assert len(codename_rows("pruning")) == 15
    assert len(codename_rows("subnet")) == 10
    assert all(
        set(row.accuracy[data]) == set(columns)
        for row in main_rows()
        for data, columns in COLUMNS.items()
    )
    assert claimed_accuracy("cifar100", "L20", "high", "subnet-optimised") == 22.40
    assert claimed_accuracy("mnist", "L2", "medium", "pruning-optimised") == 95.48
    assert claimed_accuracy("mnist", "dirichlet", "full", "full") is None
    assert claimed_accuracy("mnist", "iid", "full", "nonsense") is None


@pytest.mark.parametrize("digits", PRUNING)
def test_closed_form_of_pruning_by_hand(digits):
    parameters, multiply_adds, gamma, printed = PRUNING[digits]
    assert closed_form(digits, "pruning") == CodenameMetrics(parameters, multiply_adds, gamma)
    assert closed_form(digits, "pruning", "printed").gamma == printed


@pytest.mark.parametrize("digits", SUBNET)
def test_closed_form_of_sub_networks_by_hand(digits):
    assert closed_form(digits, "subnet") == CodenameMetrics(*SUBNET[digits])


def test_measured_tables_equal_the_closed_form(audited):
    assert audited["equal_to_closed_form"]
    assert [(row["table"], row["codename"]) for row in audited["rows"]] == [
        *(("pruning", digits) for digits in PRUNING),
        *(("subnet", digits) for digits in SUBNET),
    ]


def test_inconsistent_cells_are_marked(audited):
    wrong = {
        (row["table"], row["codename"]): set(row["wrong"])
        for row in audited["rows"]
        if row["wrong"]
    }
    every = {"parameters", "multiply_adds", "gamma", "parameter_share", "multiply_add_share"}
    assert wrong == {("pruning", "1444777777"): every, ("subnet", "1111144447"): {"gamma"}}


@pytest.mark.parametrize(
    "part",
    [
        (
            "6 rows of the pruning table (1111234567, 1111556677, 1114556677, "
            "1234556677, 1455666777, 2233445677)"
        ),
        "1111144447 and 1111444444 (pruning) have the same non-IID accuracies",
        "98.045 / 93.59 / 93.82 in one table and 97.67 / 94.12 / 94.45 in the other",
        "low, pruning-greedy, L2: 93.15; the appendix has 95.15 for 1111114444",
        (
            "medium, pruning-optimised, iid: 98.39; the appendix has 98.32 for "
            "1111223344 (pruning), and 98.39 as 11112"
        ),
        "71.64 as 1444777777 (pruning, non-IID, local)",
        "subnet-optimised, iid: 94.41; the appendix has no row 1114556677 or 1234556677",
    ],
)
def test_contradictions_of_the_paper_are_listed(audited, part):
    assert sum(part in sentence for sentence in audited["contradictions"]) == 1


def test_consistent_claims_are_not_listed(audited):
    """1111223344's non-IID accuracy is the same in both places, and FedAvg's is in one of the
    tables.
    """
    listed = " ".join(audited["contradictions"])
    assert "medium, pruning-optimised, L2" not in listed
    assert "full, full, L2" not in listed
    assert "homogeneous" not in listed


def test_audit_paper_command_and_its_exit_code(fedcover, monkeypatch):
    code, out, err = fedcover("audit", "paper")
    assert (code, err) == (0, "")
    pruning, subnet = out.partition("misprints")[0].split("recomputed")[1:]
    assert [
        sum(line.startswith("│ ") for line in table.splitlines()) for table in (pruning, subnet)
    ] == [15, 10]
    assert "our numbers equal the closed form in all rows" in out
    monkeypatch.setattr(tables, "measured_metrics", lambda *_: CodenameMetrics(1.0, 1.0, 1))
    code, out, err = fedcover("audit", "paper", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["equal_to_closed_form"] is False


# ── the designs behind the main table ─────────────────────────────────────────────────────────────


def test_every_row_of_the_main_table_has_its_designs():
    for dataset in COLUMNS:
        rows = {(design.level, design.setting) for design in designs(dataset)}
        assert rows == {(row.level, row.setting) for row in main_rows()}
        assert len(designs(dataset)) == (20 if dataset == "mnist" else 16)


@pytest.mark.parametrize(
    "row", [r for r in main_rows() if codenames(r.level, r.setting)], ids=lambda r: r.level
)
def test_one_codename_of_every_row_has_the_printed_coverage(row):
    names = codenames(row.level, row.setting)
    assert closed_form(names[0], "pruning").gamma == row.gamma
    if row.level != "high":
        assert len(names) == 1


@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_greedy_and_optimised_have_equal_capacities(level):
    pairs = zip(
        codenames(level, "pruning-greedy"), codenames(level, "pruning-optimised"), strict=True
    )
    assert all(
        sorted(codename_capacities(plain)) == sorted(codename_capacities(better))
        for plain, better in pairs
    )
    by_setting = {d.setting: d for d in designs("cifar10") if d.level == level}
    for kind in ("pruning-greedy", "subnet-static"):
        other = kind.replace("greedy", "optimised").replace("static", "optimised")
        assert by_setting[kind].fields["fleet"] == by_setting[other].fields["fleet"]


@pytest.mark.parametrize(
    ("level", "coverage"),
    {"low": (6, 8, 6, 6), "medium": (4, 7, 4, 5), "high": (3, 5, 3, 3)}.items(),
)
def test_resnet_designs_have_the_stated_coverage(level, coverage):
    """Weights of sub-networks are covered where both of their channels are: less often than the
    channels.
    """
    result = [
        audit(
            Experiment(dataset="cifar10", model="wide_resnet(depth=10, widen=1)", **design.fields)
        )["gamma_min"]
        for design in designs("cifar10")
        if design.level == level and design.setting != "homogeneous"
    ]
    assert tuple(result) == coverage
    optimised = next(
        d for d in designs("cifar10") if (d.level, d.setting) == (level, "pruning-optimised")
    )
    assert aimed_coverage(optimised) == coverage[1]


def test_slots_match_device_capacities():
    for fleet, slots in RESNET_FLEETS.values():
        expected = [
            float(Experiment(fleet=fleet, active=10, assignment="slot").scaled_fleet.capacity(i))
            for i in range(10)
        ]
        assert [len(word) / 4 for word in slots.split()] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            "slots='1234 15'",
            "slots must be words of the digits 1 to 4, each at most once in a word; got '1234 15'",
        ),
        ("slots='1234 11'", "slots must be words"),
        ("slots='1234'", "slots must name one word for each of 2 clients; got 1"),
        ("slots='12 34', kind='x'", "kind must be one of pruning, subnet; got 'x'"),
    ],
)
def test_invalid_slots_are_refused(options, sentence):
    policy = f"fedcover.paper.quarters:quarters({options})"
    with pytest.raises(InvalidValue, match=sentence):
        audit(Experiment(dataset="digits", policy=policy, fleet="1x1.0 + 1x0.5"))
