"""The cells of the paper's tables as experiments, and how they are selected."""

from collections import Counter

import pytest

from fedcover.errors import InvalidValue
from fedcover.paper.cells import AXES, RATES, cell_id, cells, select_cells
from fedcover.paper.claims import COLUMNS, DATASETS, codename_rows
from fedcover.paper.designs import designs
from fedcover.paper.smoke import smoke_cell
from fedcover.runs.experiment import Experiment
from tests.helpers.paper_results import BY_ID, EVERY


def test_main_table_has_a_cell_for_every_entry():
    for dataset in DATASETS:
        for column in COLUMNS[dataset]:
            for design in designs(dataset):
                cell = BY_ID[cell_id(dataset, column, design.name)]
                assert "table1" in cell.sets
                assert (cell.experiment.dataset, cell.experiment.lr) == (dataset, 0.01)


@pytest.mark.parametrize("kind", ["pruning", "subnet"])
def test_appendix_tables_have_cells_for_every_row(kind):
    matching = [
        cell for cell in EVERY if f"mnist-{kind}" in cell.sets and cell.row != "public-code"
    ]
    assert len(matching) == 2 * len(codename_rows(kind))
    assert {cell.column for cell in matching} == {"iid", "L2"}
    assert {cell.id for cell in matching if cell.design == "full"} == {
        "mnist-iid-full",
        "mnist-L2-full",
    }


def test_cell_is_the_papers_experiment():
    ran = BY_ID["mnist-L2-pruning-1111223344"].with_seed(2)
    assert (ran.clients, ran.active, ran.rounds, ran.epochs, ran.batch_size, ran.momentum) == (
        100,
        10,
        100,
        5,
        10,
        0.5,
    )
    assert (ran.partition, ran.assignment, ran.seed, ran.lr) == ("labels(limit=2)", "slot", 2, 0.01)
    assert BY_ID["cifar100-L50-full"].experiment.model == "wide_resnet(widen=8)"
    assert BY_ID["mnist-dirichlet-full"].experiment.partition == "dirichlet(alpha=0.1)"


def test_different_cells_are_different_experiments():
    digests = Counter(cell.experiment.digest for cell in EVERY)
    assert max(digests.values()) == 1


def test_learning_rate_is_never_chosen_on_reported_seeds_or_test_data():
    tried = [cell for cell in EVERY if cell.row == "rates"]
    assert len(tried) == len(DATASETS) * len(RATES)
    assert all(cell.experiment.validation == 0.1 for cell in tried)
    assert all(cell.experiment.validation == 0 for cell in EVERY if cell.row != "rates")
    assert not set(tried[0].seeds(3)) & set(EVERY[0].seeds(100))


def test_second_rate_is_for_full_and_medium_rows():
    second = [cell for cell in EVERY if cell.row == "second-rate"]
    assert {cell.level for cell in second} == {"full", "medium"}
    assert all(cell.experiment.lr == 0.1 for cell in second)
    assert not any(cell.row == "second-rate" for cell in cells({}))


def test_cell_filters_combine_and_seeds_come_first():
    result = select_cells(
        EVERY, ["table1"], 2, {"dataset": ["mnist"], "column": ["iid", "L5"], "row": ["main"]}
    )
    assert len(result) == 2 * 2 * 20
    assert [seed for _, seed in result] == [0] * 40 + [1] * 40
    assert {cell.column for cell, _ in result} == {"iid", "L5"}
    assert len(select_cells(EVERY, ["table1"], 3, {"seed": ["1"], "cell": ["mnist-iid-full"]})) == 1


@pytest.mark.parametrize(
    ("sets", "only", "sentence"),
    [
        (["table2"], {}, "reproduce must be one of mnist-pruning, .*; got 'table2'"),
        (["table1"], {"colour": ["red"]}, f"only must be one of {', '.join(AXES)}; got 'colour'"),
        (
            ["table1"],
            {"dataset": ["emnist"]},
            "only dataset must be one of cifar10, cifar100, mnist; got 'emnist'",
        ),
    ],
)
def test_wrong_cell_filters_are_refused(sets, only, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        select_cells(EVERY, sets, 1, only)


def test_smoke_cells_are_valid():
    for cell in EVERY:
        small = smoke_cell(cell)
        again = Experiment(**small.experiment.model_dump())
        assert (again.dataset, again.rounds, again.policy) == ("digits", 2, cell.experiment.policy)
        assert small.id != cell.id
