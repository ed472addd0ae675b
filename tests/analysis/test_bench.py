"""The plain loop, the floors and our own steps run everywhere; how long they take is nobody's
business here.
"""

from importlib import import_module

import pytest
import torch

from fedcover.analysis.bench import Measurement, baseline, page, timing
from fedcover.analysis.bench.timing import time_interleaved
from fedcover.cli import bench as bench_command
from fedcover.runs.machine import Machine
from fedcover.training.engines.compilation import eager_backend

SMALL = {"clients": 2, "batch": 2}


def test_timing_returns_seconds_of_each_repetition():
    for result in (
        baseline.eager_step("mlp", repeats=2, **SMALL),
        baseline.one_big_batch_step("mlp", "cpu", images=4, repeats=2),
    ):
        assert len(result) == 2
        assert all(seconds > 0 for seconds in result)


def test_benchmarks_take_turns():
    order = []
    works = {
        "loop": baseline.eager_clients(steps=1, **SMALL),
        "floor": baseline.matmul_floor(steps=1, **SMALL),
    }
    works["mine"] = lambda: order.append("mine")
    result = time_interleaved(works, repeats=2)
    assert {name: len(seconds) for name, seconds in result.items()} == {
        "loop": 2,
        "floor": 2,
        "mine": 2,
    }
    assert len(order) == 3  # the first does not count


def test_baseline_loop_learns():
    torch.manual_seed(0)
    module = baseline.training_model("mlp", "cpu")
    x_N, y_N = (batches[0] for batches in baseline.random_batches("mlp", "cpu", 1, 40))
    start = module.state_dict()
    baseline.train_eager_client(
        module, start, x_N, y_N, [torch.randperm(40) for _ in range(30)], 10
    )
    assert baseline.accuracy(module, x_N, y_N) > 0.9


@pytest.mark.parametrize("together", [False, True])
def test_engine_steps_are_timed(monkeypatch, together):
    # what is compiled is tested elsewhere
    monkeypatch.setattr(
        import_module("fedcover.training.engines.batched"), "inductor_backend", eager_backend
    )
    machine = Machine("streams", "cpu", threads=1).resolved()
    result = timing.step_seconds("mlp", machine, clients=2, together=together, repeats=2)
    assert len(result) == 2
    assert all(second > 0 for second in result)


def test_bench_warns_of_unsteady_figures(capsys, monkeypatch):
    figures = [
        Measurement("steady", (1.0, 1.4)),
        Measurement("not so", (1.0, 1.6)),
        Measurement("nor this", (2.0, 1.0)),
    ]
    for some, warning in ((figures, "2 of 3 timings vary more than 1.5-fold"), (figures[:1], "")):
        monkeypatch.setattr(bench_command, "measure", lambda device, some=some: some)
        bench_command.bench(device="cpu")
        err = capsys.readouterr().err
        assert warning in err
        assert bool(warning) == bool(err)


def test_bench_page_shows_medians_spread_and_ratios():
    text = page([Measurement("a step", (3.0, 1.0, 2.0), (("than the loop", 4.5),))], "cpu")
    assert "| a step | 2.000 | 1.000 to 3.000 | 3 | than the loop 4.500 |" in text
    assert torch.__version__ in text
