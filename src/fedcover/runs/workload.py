"""What a run has to compute, and how much work that is: engine, threads and processes depend on it.

Nothing here is exact. The estimates only have to tell which choice is faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedcover.fleet import sample_cohort
from fedcover.models.norms import statistics_key
from fedcover.server.round_setup import RoundSettings
from fedcover.training.engines import stacked_layers
from fedcover.types import Task

SMALL_STEP = 100_000_000
"""Multiply-adds of a forward pass below which a second thread waits more than it works."""

LARGE_STEP = 10_000_000_000
"""Multiply-adds of a client's forward pass from which on torch's convolutions fill a GPU.

Measured on an H200: at 2 billion (WRN28-2, ten images) stacking clients was 1.6 times faster, at
34 billion (WRN28-8) it was not.
"""

STEP_SECONDS, MULTIPLY_ADDS_PER_SECOND = 2e-4, 1e10
"""Least time of a local step, and its speed: a rough estimate, to see if processes pay.

The MLP of the MNIST job comes out at 0.7 ms a step; one core of an AMD EPYC took 0.17 (batched)
to 0.6 (sequential).
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run has to compute.

    Attributes:
        experiment: The fields that a round reads.
        task: Its data, model and recipe, checked.
        uses: How often each weight of the model is multiplied for one sample.
    """

    experiment: RoundSettings
    task: Task
    uses: Mapping[str, int]

    def multiply_adds_per_step(self) -> int:
        """Return the multiply-adds of a forward pass of the whole model for one batch."""
        sizes = {name: p.numel() for name, p in self.task.model.module.named_parameters()}
        per_sample = sum(sizes.get(name, 0) * times for name, times in self.uses.items())
        return per_sample * self.task.local.batch_size

    def has_small_steps(self) -> bool:
        """Return whether one client's step is too little work to keep a processor busy."""
        return self.multiply_adds_per_step() < SMALL_STEP

    def num_steps(self) -> float:
        """Estimate the local steps of all clients in all rounds."""
        local = self.task.local
        row_counts = self._sample_row_counts()
        client_epochs = self.experiment.rounds * self.experiment.active * local.epochs
        return client_epochs * sum(row_counts) / len(row_counts) / local.batch_size

    def suits_stacking(self) -> bool:
        """Return whether stacking all clients' layers fills a GPU better than streams do."""
        if not stacked_layers.has_stacked_kernels(self.task.model.module):
            return False
        if statistics_key(self.task.norm, 1.0) is not None:
            return False
        # stacked clients take equally many steps, and each such number needs its own capture
        if len(set(self._sample_row_counts())) > 2:
            return False
        return self.multiply_adds_per_step() < LARGE_STEP

    def seconds_in_one_process(self) -> float:
        """Estimate how long the run takes in one process."""
        experiment, local = self.experiment, self.task.local
        cohort = sample_cohort(experiment.clients, experiment.active, self.task.seed, 0)
        rows = sum(self.task.source.count(client) for client in cohort)
        samples = rows * local.epochs * experiment.rounds
        # a backward pass takes twice the work of a forward pass
        multiply_adds = 3 * self.multiply_adds_per_step()
        step_seconds = STEP_SECONDS + multiply_adds / MULTIPLY_ADDS_PER_SECOND
        return samples / local.batch_size * step_seconds

    def _sample_row_counts(self) -> list[int]:
        """Return how many rows each of the first ten clients has."""
        clients = range(min(self.experiment.clients, 10))
        return [self.task.source.count(client) for client in clients]
