"""When a soak fails: lost updates, and memory that grows."""

import pytest
from benchmarks.flower_soak import failures
from benchmarks.process_memory import MemoryLog, growth, slope

NOISE = [3, 0, 8, 2, 7, 1, 5, 9, 4, 6, 0, 7, 2, 8, 3, 5, 1, 9, 4, 6]
BEGINNING = [500.0, 800.0, 950.0, 990.0]
"""The rounds before memory has settled."""
DIPS = [-5000 * (n % 6 == 2) for n in range(16)]
"""Memory that the allocator returns for a while."""


def series(*kib):
    return growth([*BEGINNING, *kib])


@pytest.mark.parametrize("rounds", [7, 8, 9, 10])
def test_trend_is_symmetric_in_sign(rounds):
    kib = [3.0, 10.0, 81.0, 22.0, 67.0, 14.0, 95.0, 9.0, 46.0, 60.0][:rounds]
    up, down = slope(kib), slope([-size for size in kib])
    assert up["kib_per_round"] == -down["kib_per_round"]
    assert up["between"] == [-bound for bound in reversed(down["between"])]


def test_leak_has_a_slope():
    leak = series(*(1000 + 20 * n + NOISE[n] for n in range(16)))
    assert leak["grows"]
    assert leak["kib_per_round"] == pytest.approx(20, abs=1)
    assert leak["percent"] == pytest.approx(30, abs=1)


@pytest.mark.parametrize(
    "kib",
    [
        [1000 + 132 * (n // 3) for n in range(26)],  # step after step
        [10000.0 + 2 * n for n in range(46)],
        [1000 + 20 * n + DIPS[n] for n in range(16)],
    ],
)
def test_memory_that_is_never_returned_grows(kib):
    assert series(*kib)["grows"]


@pytest.mark.parametrize(
    "kib",
    [
        [1000 + NOISE[n] for n in range(16)],
        [1000 + 132 * (n > 4) for n in range(16)],  # one step of the allocator
        [1000.0] * 16,
        [10000.0 + n for n in range(46)],  # less than half a percent
        [1000 + NOISE[n] + DIPS[n] for n in range(16)],
    ],
)
def test_memory_that_comes_and_goes_does_not_grow(kib):
    assert not series(*kib)["grows"]


def figures(used=640, ended=0, **kib_per_round):
    rounds = range(30)
    memory = {
        f"superlink {name.replace('_', '-')}": growth([100_000 + kib * n for n in rounds])
        for name, kib in kib_per_round.items()
    }
    return {
        "updates_asked": 640,
        "updates_used": used,
        "processes": len(memory) + ended,
        "memory": memory,
    }


def test_soak_without_loss_and_growth_passes():
    level = figures(flwr_serverapp=0, flower_superlink=64, flower_superexec=-100)
    assert list(failures(level)) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (figures(used=639), "1 of 640 updates were lost"),
        (figures(ended=1), "1 long-lived processes ended before the run"),
        (
            figures(flwr_serverapp=30),
            "superlink flwr-serverapp grows by 30.0 KiB a round; it must not grow",
        ),
        (
            figures(flower_superlink=65),
            "superlink flower-superlink grows by 65.0 KiB a round; the limit is 64",
        ),
    ],
)
def test_soak_says_what_is_wrong(wrong, message):
    assert list(failures(wrong)) == [message]


def test_process_that_ended_is_no_survivor():
    log = MemoryLog({"a": 1, "b": 2}, [{"a": 5, "b": 6}, {"a": 5}])
    assert log.survivors == ["a"]
