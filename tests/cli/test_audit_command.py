"""The command `audit`, against closed forms and the paper's figures."""

import json

import pytest
from rich.console import Console

from fedcover.cli import console


def closed_form(codename: str, kind: str) -> dict:
    """The paper's MLP, 784-200-10: quarters of the first layer's weights, or of the
    hidden units.
    """
    regions_by_digit = {
        "1": "1234",
        "2": "134",
        "3": "124",
        "4": "123",
        "5": "14",
        "6": "13",
        "7": "12",
    }
    quarters = [4 - len(regions_by_digit[digit]) for digit in codename]
    if kind == "pruning":
        sizes = [(159_010 - 39_200 * k, 158_800 - 39_200 * k) for k in quarters]
    else:
        sizes = [(795 * (200 - 50 * k) + 10, 794 * (200 - 50 * k)) for k in quarters]
    covered = {f"S{r}": sum(r in regions_by_digit[digit] for digit in codename) for r in "1234"}
    return {
        "parameters": sum(p for p, _ in sizes) / len(codename),
        "multiply_adds": sum(m for _, m in sizes) / len(codename),
        "gamma_min": min(covered.values()),
        "coverage": covered,
    }


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
@pytest.mark.parametrize(
    "codename",
    [
        "1111111111",
        "1111223344",
        "1111234567",
        "1234556677",
        "1444777777",
        "2233445677",
        "7",
        "5674",
    ],
)
def test_audit_of_a_codename_equals_the_closed_form(fedcover, codename, kind):
    code, out, err = fedcover("audit", codename, "--kind", kind, "--json")
    output = json.loads(out)
    assert (code, err) == (0, "")
    assert {key: output[key] for key in closed_form(codename, kind)} == closed_form(codename, kind)
    assert (output["codename"], output["kind"], output["model"]) == (codename, kind, "mlp")
    assert sum(output["histogram"].values()) == 159_010
    assert sum(row["devices"] for row in output["capacities"]) == len(codename)
    for row in output["capacities"]:
        assert row["bytes_up"] == 4 * row["parameters"] <= row["bytes_down"]
        assert row["memory"] > (8 * row["parameters"] if kind == "subnet" else 8 * 159_010)
        assert (row["delta2"] == 0) == (row["capacity"] == 1)


def test_audit_gives_the_papers_figures(fedcover):
    """Parameters, multiply-adds and coverage as the paper prints them (its wrong rows left out)."""
    printed = {
        "1111114444": (143_330, 143_120, 6),
        "1111144447": (135_490, 135_280, 5),
        "1111556677": (111_970, 111_760, 6),
        "1455666777": (92_370, 92_160, 3),
    }
    for codename, (parameters, multiply_adds, gamma) in printed.items():
        output = json.loads(fedcover("audit", codename, "--json")[1])
        assert (output["parameters"], output["multiply_adds"], output["gamma_min"]) == (
            parameters,
            multiply_adds,
            gamma,
        )
    assert (
        json.loads(fedcover("audit", "1234556677", "--p5", "printed", "--json")[1])["gamma_min"]
        == 3
    )


def test_audit_command_of_a_fleet(fedcover):
    code, out, err = fedcover(
        "audit",
        "--fleet",
        "3x1.0 + 2x0.5",
        "--model",
        "mlp(hidden=[8])",
        "--dataset",
        "digits",
        "--json",
    )
    output = json.loads(out)
    assert (code, err, output["gamma_min"]) == (0, "", 3)
    assert [row["parameters"] for row in output["capacities"]] == [
        64 * 8 + 8 + 80 + 10,
        64 * 4 + 4 + 40 + 10,
    ]
    code, out, err = fedcover("audit", "--fleet", "3x1.0 + 2x0.5")
    assert (code, err) == (0, "")
    assert "every parameter is trained by at least 3 clients" in out
    code, out, err = fedcover("audit", "1144")
    assert "at least 2 clients (S1 4, S2 4, S3 4, S4 2)" in out


def test_tables_fit_eighty_columns_without_cutting_numbers(fedcover, monkeypatch):
    monkeypatch.setattr(console, "output", lambda: Console(width=80, highlight=False))
    for words, numbers in {
        ("audit", "paper"): ["159,010", "100,210", "91,310", "multiply_add_share"],
        ("audit", "1144"): ["2,584,004", "498,841", "0.01497"],
    }.items():
        code, out, err = fedcover(*words)
        assert (code, err, "…" in out) == (0, "", False)
        assert [number for number in numbers if number not in out] == []
        assert max(len(line) for line in out.splitlines() if line.startswith(("┃", "│"))) <= 80
