"""The plain loop, the floors and our own steps run everywhere; how long they take is nobody's business here."""

import os
import platform
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from benchmarks.flower_memory import (
    growth,
    hold_more,
    install_probe,
    minimum_by_round,
    read_probe,
    trend,
    verdict,
)

from fedcover.analysis.bench import Measurement, baseline, page, timing
from fedcover.analysis.bench.timing import time_interleaved
from fedcover.cli import bench as bench_command
from fedcover.runs.machine import Machine
from fedcover.training.engines.compilation import eager_backend

SMALL = {"clients": 2, "batch": 2}


def test_every_function_gives_the_seconds_of_each_repetition():
    for found in (
        baseline.eager_step("mlp", repeats=2, **SMALL),
        baseline.one_big_batch_step("mlp", "cpu", images=4, repeats=2),
    ):
        assert len(found) == 2
        assert all(seconds > 0 for seconds in found)


def test_pieces_of_work_are_measured_by_turns():
    done = []
    works = {
        "loop": baseline.eager_clients(steps=1, **SMALL),
        "floor": baseline.matmul_floor(steps=1, **SMALL),
    }
    works["mine"] = lambda: done.append("mine")
    found = time_interleaved(works, repeats=2)
    assert {name: len(seconds) for name, seconds in found.items()} == {
        "loop": 2,
        "floor": 2,
        "mine": 2,
    }
    assert len(done) == 3  # the first does not count


def test_the_loop_learns():
    torch.manual_seed(0)
    module = baseline.training_model("mlp", "cpu")
    x_N, y_N = (batches[0] for batches in baseline.random_batches("mlp", "cpu", 1, 40))
    start = module.state_dict()
    baseline.train_eager_client(
        module, start, x_N, y_N, [torch.randperm(40) for _ in range(30)], 10
    )
    assert baseline.accuracy(module, x_N, y_N) > 0.9


@pytest.mark.parametrize("together", [False, True])
def test_our_own_steps_are_measured_alike(monkeypatch, together):
    # what is compiled is tested elsewhere
    monkeypatch.setattr(
        import_module("fedcover.training.engines.batched"), "inductor_backend", eager_backend
    )
    machine = Machine("streams", "cpu", threads=1).resolved()
    found = timing.step_seconds("mlp", machine, clients=2, together=together, repeats=2)
    assert len(found) == 2
    assert all(second > 0 for second in found)


def test_bench_tells_when_figures_are_not_steady(capsys, monkeypatch):
    figures = [
        Measurement("steady", (1.0, 1.4)),
        Measurement("not so", (1.0, 1.6)),
        Measurement("nor this", (2.0, 1.0)),
    ]
    for some, said in ((figures, "2 of 3 timings vary more than 1.5-fold"), (figures[:1], "")):
        monkeypatch.setattr(bench_command, "measure", lambda device, some=some: some)
        bench_command.bench(device="cpu")
        err = capsys.readouterr().err
        assert said in err
        assert bool(said) == bool(err)


def test_a_page_tells_medians_spread_and_ratios():
    text = page([Measurement("a step", (3.0, 1.0, 2.0), (("than the loop", 4.5),))], "cpu")
    assert "| a step | 2.000 | 1.000 to 3.000 | 3 | than the loop 4.500 |" in text
    assert torch.__version__ in text


@pytest.mark.parametrize("rounds", [7, 8, 9, 10])
def test_what_shrinks_is_measured_like_what_grows(rounds):
    kib = [3.0, 10.0, 81.0, 22.0, 67.0, 14.0, 95.0, 9.0, 46.0, 60.0][:rounds]
    up, down = trend(kib), trend([-size for size in kib])
    assert up["kib_per_round"] == -down["kib_per_round"]
    assert up["between"] == [-bound for bound in reversed(down["between"])]


def test_memory_that_is_kept_is_told_from_memory_that_comes_and_goes():
    """A leak goes on to the end; noise has no direction; a step of the allocator ends."""
    noise = [3, 0, 8, 2, 7, 1, 5, 9, 4, 6, 0, 7, 2, 8, 3, 5, 1, 9, 4, 6]
    start = [500.0, 800.0, 950.0, 990.0]  # before it has settled
    leak = growth([*start, *(1000 + 20 * n + noise[n] for n in range(16))])
    assert leak["grows"]
    assert leak["kib_per_round"] == pytest.approx(20, abs=1)
    assert leak["percent"] == pytest.approx(30, abs=1)
    assert verdict({"a": leak, "b": growth([1.0] * 20)}) == {
        "rise": ["a"], "grow": ["a"],
        "kib_per_round_at_most": leak["second_half"]["between"][1], "percent_at_most": leak["percent"],
    }  # fmt: skip
    assert not growth([*start, *(1000 + noise[n] for n in range(16))])["grows"]
    assert not growth([*start, *(1000 + 132 * (n > 4) for n in range(16))])["grows"]
    assert growth([*start, *(1000 + 132 * (n // 3) for n in range(26))])["grows"]  # step after step
    assert not growth([*start, *(1000.0 for _ in range(16))])["grows"]
    drift = growth([*start, *(10000.0 + n for n in range(46))])  # a page now and then
    assert (drift["rises"], drift["grows"]) == (True, False)
    assert growth([*start, *(10000.0 + 2 * n for n in range(46))])["grows"]
    dips = [
        -5000 * (n % 6 == 2) for n in range(16)
    ]  # memory that the allocator gives back for a while
    assert growth([*start, *(1000 + 20 * n + dips[n] for n in range(16))])["grows"]
    assert not growth([*start, *(1000 + noise[n] + dips[n] for n in range(16))])["grows"]


def test_what_is_held_is_the_least_of_every_round_that_was_looked_at():
    looks = [(0.5, 7, 70), (0.9, 5, 80), (1.0, 6, 60), (3.5, 9, 90), (8.0, 1, 1)]
    assert minimum_by_round(looks, [1.0, 2.0, 4.0]) == [[5, 60], [9, 90]]


def test_who_tells_too_little_is_left_out(tmp_path):
    """One may not look for garbage but now and then, or not at all."""
    for pid, often in ((1, 1), (2, 7)):
        lines = (f"{n + 0.5} {100 + n} {2000 - n}\n" for n in range(0, 20, often))
        (tmp_path / f"held-{pid}.txt").write_text("".join(lines))
    found = read_probe(
        tmp_path, {"often": 1, "seldom": 2, "never": 3}, [n + 1.0 for n in range(20)]
    )
    assert list(found) == ["often"]
    assert found["often"]["pieces"]["pieces_per_round"] == 1
    assert hold_more(found) == ["often: pieces"]


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc tells what it has given out"
)
def test_a_long_lived_process_tells_what_it_holds(tmp_path):
    """After every look for garbage; any other process tells nothing."""
    folder = install_probe(tmp_path / "telling")
    hold = "import gc; gc.collect(); kept = [bytes(400) for _ in range(5000)], bytes(10**6); gc.collect()"
    for program in ("flwr-serverapp", "flwr-clientapp"):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run([sys.executable, "-c", hold, program], env=environment, check=True)
    (file,) = folder.glob("held-*.txt")
    before, after, *_ = (list(map(float, line.split())) for line in file.read_text().splitlines())
    assert 5000 <= after[1] - before[1] < 5100
    assert 10**6 <= after[2] - before[2] < 2 * 10**6
