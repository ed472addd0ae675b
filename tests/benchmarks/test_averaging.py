"""The averages of the comparison are those that a run keeps, and its tables say what is stored."""

import pytest
import torch

from benchmarks import averaging
from fedcover.server.averaging import AVERAGES, MEAN, update_average
from tests.helpers.worlds import same

ROUNDS = 30


@pytest.fixture
def models():
    generator = torch.Generator().manual_seed(0)
    everywhere = {"w": torch.ones(3, 2, dtype=torch.bool)}
    return [({"w": torch.randn(3, 2, generator=generator)}, everywhere) for _ in range(ROUNDS)]


def kept_average(models, schedule):
    average = {}
    for round, (params, _) in enumerate(models, 1):
        average = update_average(average, params, schedule(round, ROUNDS))
    return average[MEAN]


@pytest.mark.parametrize("length", [5, 20])
def test_window_is_that_of_a_run(models, length):
    expected = kept_average(models, AVERAGES["window"](rounds=length))
    same(averaging.window_mean(models[-length:], models[-1][0]), expected, 1e-5)


@pytest.mark.parametrize("decay", [0.8, 0.98])
def test_moving_average_is_that_of_a_run(models, decay):
    expected = kept_average(models, AVERAGES["ema"](decay=decay))
    same(averaging.moving_average(models, decay), expected, 1e-5)


def test_entries_count_only_in_covered_rounds():
    models = [
        ({"w": torch.tensor([value, value])}, {"w": torch.tensor(covered)})
        for value, covered in [(1.0, [True, False]), (2.0, [False, False]), (4.0, [True, False])]
    ]
    window = averaging.window_mean(models[1:], models[-1][0])
    assert window["w"].tolist() == [4.0, 4.0]
    assert averaging.moving_average(models, 0.01)["w"].tolist() == pytest.approx([3.97, 1.0])


def test_every_cell_is_an_experiment_of_its_own():
    digests = [cell.experiment.digest for data in averaging.DATA for cell in averaging.cells(data)]
    assert len(set(digests)) == len(digests) == 27 * 8


def test_tables_name_the_best_candidate():
    lines = [
        {
            "data": "mnist",
            "split": split,
            "fleet": "whole",
            "policy": "full",
            "seed": seed,
            "scores": {
                name: {"validation": value, "test": value + seed / 100}
                for name, value in (("last", 0.5), ("window 5", 0.6), ("window 10", 0.7))
            },
        }
        for split in averaging.SPLITS
        for seed in (0, 1)
    ]
    text = averaging.tables(lines)
    assert "| iid | 50.50 | 70.50 | +20.00 ± 0.00 |" in text
    assert "| iid | whole | full | 50.50 ± 0.71 | 70.50 ± 0.71 |" in text
