"""Everything that stays the same from round to round."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from fedcover.fleet import Fleet, sample_cohort
from fedcover.server.aggregation import summable_coverage_mean
from fedcover.server.collectives import SINGLE_PROCESS, ProcessGroup
from fedcover.server.grid_noise import ByteStream, fresh_stream
from fedcover.server.optimizers import ServerStep
from fedcover.server.privacy import Gaussian, max_participations
from fedcover.submodels.cost import uses_of_weights
from fedcover.submodels.reductions import Slices
from fedcover.types import Engine, GrowthStep, Policy, Rule, Task


@dataclass(frozen=True)
class Setup:
    """The objects and numbers of an experiment, resolved from its fields.

    `task` is what local training needs. `rule` aggregates parameters; `mean` averages norm
    statistics and measurements. `lr` is the learning rate of a round. `growth` changes the model
    between rounds. `process_group` is the processes that share the run. `noise` opens a fresh
    stream of random bytes for privacy. The other fields are those of `Experiment` with the same name.
    """

    task: Task
    fleet: Fleet
    clients: int
    active: int
    assignment: str
    capacity: str
    drop_out: float
    policy: Policy
    check_capacity: bool
    engine: Engine
    rule: Rule
    weights: str
    uncovered: str
    server: ServerStep
    lr: Callable[[int], float]
    rounds: int
    window: int
    evaluate_every: int
    local_every: int | None
    evaluation: str
    mean: Rule = field(default_factory=summable_coverage_mean)
    process_group: ProcessGroup = SINGLE_PROCESS
    clip_updates: float | None = None
    growth: GrowthStep | None = None
    privacy: Gaussian | None = None
    noise: Callable[[], ByteStream] = fresh_stream

    def max_participations(self, round: int) -> int:
        """Return how often the most often sampled client has been sampled after a round."""
        max_by_round, remaining = self._max_participations
        missing = max(0, round + 1 - len(max_by_round))
        max_by_round.extend(itertools.islice(remaining, missing))
        return max_by_round[round]

    @cached_property
    def _max_participations(self) -> tuple[list[int], Iterator[int]]:
        """What `max_participations` has returned so far, and an iterator over later rounds."""
        clients, active, seed = self.clients, self.active, self.task.seed
        cohorts = (sample_cohort(clients, active, seed, round) for round in itertools.count())
        return [], max_participations(cohorts)

    @cached_property
    def reduction_cache(self) -> dict[bytes, Slices]:
        """The slices of the last round by their encoding, so that equal ones are reused."""
        return {}

    @cached_property
    def uses(self) -> dict[str, int]:
        """How often each weight is multiplied for one sample."""
        x = self.task.source.test.x
        return uses_of_weights(self.task.model.module, x.shape[1:], x.dtype)
