"""Measure how many images a second a whole sweep of MNIST runs trains.

    python benchmarks/sweep_mnist.py [--runs 48] [--rounds 100] [--processes auto 1]
        [--data FOLDER] [--output FILE]

The experiments are five policies on one fleet (masks, slices, the paper's codename), with as many
seeds as the number of runs needs. Every run is evaluated after every round. The time includes
starting processes, reading data and the first round.
"""

import argparse
import platform
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.sweep import choose_num_processes, sweep

POLICIES = ("prefix", "rolling", "magnitude", "random", 'regions(codename="1111223344")')
EPOCHS, ACTIVE = 5, 10


def settings(runs: int, rounds: int, dataset: str) -> list[Experiment]:
    """So many runs: every policy with seed 0, then with seed 1, and so on."""
    return [
        Experiment(
            name=f"run-{number}",
            dataset=dataset,
            model="mlp",
            fleet="4x1.0 + 6x0.75",
            assignment="slot",
            clients=100,
            policy=POLICIES[number % len(POLICIES)],
            active=ACTIVE,
            rounds=rounds,
            epochs=EPOCHS,
            batch_size=10,
            seed=number // len(POLICIES),
        )
        for number in range(runs)
    ]


def measure(
    experiments: Sequence[Experiment], machine: Machine, data: str | None, samples: int
) -> str:
    """A row: processes, seconds, images a second in all and once everything has started,
    accuracies.
    """
    ends: list[float] = []
    start = time.perf_counter()
    results = list(
        sweep(
            experiments,
            machine=machine,
            data=data,
            watch=lambda e, report: ends.append(time.perf_counter()),
        )
    )
    seconds = time.perf_counter() - start
    images = samples * ACTIVE * EPOCHS
    first = len(ends) // 4
    steady = images * (len(ends) - first) / (ends[-1] - ends[first - 1])
    accuracies = [run.metrics[-1]["accuracy"] for run in results]
    size = choose_num_processes(experiments, machine.resolved(), data)
    return (
        f"| {size} | {seconds:.1f} | {images * len(ends) / seconds / 1e6:.2f} | {steady / 1e6:.2f} "
        f"| {min(accuracies):.4f} to {max(accuracies):.4f} |"
    )


def main() -> None:
    """Measure each number of processes in turn, and keep the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--processes", nargs="+", default=["auto", "1"])
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument(
        "--samples", type=int, default=600, help="rows of each client in that data set"
    )
    parser.add_argument("--precision", default="tf32" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--data")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    hardware = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    )
    lines = [
        (
            f"# A sweep of {arguments.runs} {arguments.dataset} runs of "
            f"{arguments.rounds} rounds on {hardware}"
        ),
        "",
        f"{date.today()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {arguments.precision}. "
        "`benchmarks/sweep_mnist.py`, one run each.",
        "",
        (
            "| processes | seconds | million images/s | the same from a "
            "quarter of the rounds on | accuracy |"
        ),
        "|---|---|---|---|---|",
    ]
    for word in arguments.processes:
        machine = Machine(
            precision=arguments.precision, processes=int(word) if word.isdecimal() else word
        )
        experiments = settings(arguments.runs, arguments.rounds, arguments.dataset)
        lines.append(measure(experiments, machine, arguments.data, arguments.samples))
        print("\n".join(lines), flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
