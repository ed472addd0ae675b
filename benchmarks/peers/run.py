"""Time one MNIST job on fedcover, pfl, Flower's simulation and a plain loop.

    python benchmarks/peers/run.py [--rounds 10] [--repeats 3] [--data DIR] [--environments DIR]

The result is seconds per round at equal accuracy. All train the same batches of the same clients
from the same weights (benchmarks/job.py). The first call creates a virtual environment for each
peer. Each runs in the form that is fastest on two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent))

from job import mnist_job, save  # noqa: E402

TORCH = "torch==2.13.0"
NEEDS = {"pfl": "pfl==0.6.0", "flower": "flwr[simulation]==1.41.0"}
SAMPLES = 10 * 600 * 5
"""Images that the clients of a round go through."""


def environment(name: str, folder: Path) -> str:
    """The Python of a peer's environment; torch first and pinned, so that nothing replaces it."""
    python = folder / name / "bin" / "python"
    marker = folder / name / "installed"
    if not marker.exists():
        print(f"making the environment {folder / name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        for packages in ([TORCH, "numpy"], [TORCH, NEEDS[name]]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        marker.touch()
    return str(python)


def contenders(
    folder: Path, job: Path, rounds: int, dataset: str
) -> dict[str, Callable[[], list[str]]]:
    """How the command of each is made, without the file for its result."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def fedcover(engine: str, processes: int) -> list[str]:
        return [
            sys.executable,
            str(HERE / "fedcover_mnist.py"),
            engine,
            str(processes),
            str(rounds),
            dataset,
        ]

    return {
        "fedcover batched, 2 processes": lambda: fedcover("batched", 2),
        "fedcover batched, 1 process": lambda: fedcover("batched", 1),
        "fedcover sequential, 2 processes": lambda: fedcover("sequential", 2),
        "fedcover sequential, 1 process": lambda: fedcover("sequential", 1),
        "pfl, torchrun, 2 processes": lambda: [
            environment("pfl", folder),
            *torchrun,
            str(HERE / "pfl_mnist.py"),
            str(job),
        ],
        "Flower simulation, 2 Ray actors": lambda: [
            environment("flower", folder),
            str(HERE / "flower_mnist.py"),
            str(job),
        ],
        "plain eager loop, 1 process": lambda: [
            sys.executable,
            str(HERE / "eager_mnist.py"),
            str(job),
        ],
    }


def measure(command: list[str], folder: Path, data: str | None) -> dict[str, list[float]]:
    """Run one contender alone, one thread a process; its seconds and accuracies, round by round."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    own = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **({"FEDCOVER_DATA": data} if data else {}),
    }
    process = subprocess.run(
        [*command, str(result)],
        env={**os.environ, **own},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if process.returncode or not result.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-3000:]}")
    figures: dict[str, list[float]] = json.loads(result.read_text())
    return figures


def table(runs: dict[str, list[dict[str, list[float]]]]) -> str:
    """One line for each contender: the median of all rounds but the first, its spread over the
    repetitions.
    """
    rows = [
        (
            "| who | s per round | spread | samples/s | first round, s | "
            "accuracy | times the fastest |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    middles = {
        who: median(s for run in figures for s in run["seconds"][1:])
        for who, figures in runs.items()
    }
    for who, figures in sorted(runs.items(), key=lambda item: middles[item[0]]):
        each = [median(run["seconds"][1:]) for run in figures]
        first = median(run["seconds"][0] for run in figures)
        accuracy = {f"{100 * run['accuracy'][-1]:.2f}" for run in figures}
        rows.append(
            f"| {who} | {middles[who]:.3f} | {min(each):.3f} to {max(each):.3f} "
            f"| {SAMPLES / middles[who]:,.0f} "
            f"| {first:.1f} | {' '.join(sorted(accuracy))} % | "
            f"{middles[who] / min(middles.values()):.2f} |"
        )
    return "\n".join(rows)


def hardware() -> str:
    """The processor's name and how many cores may be used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def report(runs: dict[str, list[dict[str, list[float]]]], rounds: int, repeats: int) -> str:
    """The page that is kept."""
    versions: dict[str, object] = {}
    for figures in runs.values():
        versions |= dict(figures[0]["versions"])
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return (
        f"# One MNIST job on fedcover and its peers\n\n{date.today()}, {hardware()}. {listed}.\n\n"
        "100 clients, 10 a round, 5 epochs of batches of 10, MLP 784-200-10, "
        "evaluation after each round; the same "
        f"partition,\ncohorts, shuffles and initial weights for all. {repeats} "
        f"runs of {rounds} rounds each, one "
        "contender after another; median over all\nrounds but the first (which "
        "compiles, or starts actors); spread: "
        f"the medians of single runs. Accuracy after the last round.\n\n{table(runs)}\n"
    )


def main(say: Callable[[str], None] = print) -> None:
    """Run everybody in turn, and keep the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", help="folder of the data sets; else $FEDCOVER_DATA")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache" / "fedcover-peers"
    )
    parser.add_argument("--only", nargs="*", help="words of the contenders to run")
    parser.add_argument(
        "--output", type=Path, help="where the table goes; else results/peers_<hardware>_<date>.md"
    )
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.npz"
        save(mnist_job(arguments.rounds, arguments.dataset, arguments.data), job)
        everybody = contenders(
            arguments.environments.resolve(), job, arguments.rounds, arguments.dataset
        )
        words = arguments.only or [""]
        commands = {
            who: make() for who, make in everybody.items() if any(word in who for word in words)
        }
        for repeat in range(arguments.repeats):
            for who, command in commands.items():
                runs.setdefault(who, []).append(measure(command, Path(folder), arguments.data))
                say(
                    f"{repeat + 1}/{arguments.repeats}  {who}: "
                    f"{median(runs[who][-1]['seconds'][1:]):.3f} s per round"
                )
    page = report(runs, arguments.rounds, arguments.repeats)
    say("\n" + page)
    short = "".join(c if c.isalnum() else "-" for c in hardware().split("@")[0]).strip("-").lower()
    path = arguments.output or HERE.parent / "results" / f"peers_{short}_{date.today()}.md"
    path.write_text(page)
    say(f"written to {path}")


if __name__ == "__main__":
    main()
