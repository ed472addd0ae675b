"""What a round is run with."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fedcover.fleet import Fleet, sample_cohort
from fedcover.server.aggregation import coverage_mean
from fedcover.server.collectives import SINGLE_PROCESS, ProcessGroup
from fedcover.server.grid_noise import ByteStream, fresh_stream
from fedcover.server.optimizers import ServerStep
from fedcover.server.privacy import Gaussian, most_turns
from fedcover.submodels.cost import uses_of_weights
from fedcover.submodels.reductions import Slices
from fedcover.types import Engine, GrowthStep, Policy, Rule, Task


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same from round to round, resolved from an experiment."""

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
    mean: Rule = coverage_mean
    ranks: ProcessGroup = SINGLE_PROCESS
    clip_updates: float | None = None
    growth: GrowthStep | None = None
    privacy: Gaussian | None = None
    noise: Callable[[], ByteStream] = fresh_stream

    @cached_property
    def _turns(self) -> tuple[list[int], Iterator[int]]:
        known = self.clients, self.active, self.task.seed
        return [], most_turns(sample_cohort(*known, round) for round in itertools.count())

    def turns(self, round: int) -> int:
        """How often the client that is asked most often has been asked by the end of a round."""
        counted, coming = self._turns
        counted.extend(itertools.islice(coming, max(0, round + 1 - len(counted))))
        return counted[round]

    @cached_property
    def reduction_cache(self) -> dict[bytes, Slices]:
        """The parts of the last round by their codes: what was made of them serves again."""
        return {}

    @cached_property
    def uses(self) -> dict[str, int]:
        """How often each weight is multiplied for one sample."""
        x = self.task.source.test.x
        return uses_of_weights(self.task.model.module, x.shape[1:], x.dtype)
