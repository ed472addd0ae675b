"""The job on fedcover: fedcover_mnist.py ENGINE PROCESSES ROUNDS DATASET RESULT."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from job import experiment
from peers.common import Watch

import fedcover as fc

engine, processes, rounds, dataset, result = sys.argv[1:]
watch = Watch()


def note(report):
    """The last round measures more than the others do, so it does not count."""
    if report.round < int(rounds):
        watch.round(report.metrics["accuracy"])


with tempfile.TemporaryDirectory() as folder:
    watch.__init__()
    fc.run(
        experiment(int(rounds) + 1, dataset), Path(folder) / "run",
        machine=fc.Machine(engine=engine, device="cpu", processes=int(processes)), watch=note,
    )  # fmt: skip
watch.write(result, fedcover=fc.__version__)
