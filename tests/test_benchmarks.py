"""The benchmarks' loop and floors run everywhere; how long they take is nobody's business here."""

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def eager():
    path = Path(__file__).parent.parent / "benchmarks" / "eager.py"
    found = importlib.util.spec_from_file_location("eager", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_function_gives_the_seconds_of_each_repetition(eager):
    small = {"clients": 2, "batch": 2}
    for found in (
        eager.eager_step("mlp", repeats=2, **small),
        eager.eager_round(samples=4, epochs=1, test=8, repeats=2, **small),
        eager.matmul_step(repeats=2, **small),
        eager.one_big_batch_step("mlp", "cpu", images=4, repeats=2),
    ):
        assert len(found) == 2
        assert all(seconds > 0 for seconds in found)


def test_the_loop_learns(eager):
    torch.manual_seed(0)
    module = eager.trainable("mlp", "cpu")
    x_N, y_N = (batches[0] for batches in eager.random_batches("mlp", "cpu", 1, 40))
    start = module.state_dict()
    eager.train_client(module, start, x_N, y_N, [torch.randperm(40) for _ in range(30)], 10)
    assert eager.accuracy(module, x_N, y_N) > 0.9
