"""Everything that stays the same from round to round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedcover.fleet import Fleet
from fedcover.server.aggregation import summable_coverage_mean
from fedcover.server.averaging import RateSchedule, average_none
from fedcover.server.collectives import SINGLE_PROCESS, ProcessGroup
from fedcover.server.grid_noise import ByteStream, fresh_stream
from fedcover.server.optimizers import ServerStep
from fedcover.server.privacy import Gaussian
from fedcover.types import Engine, Policy, Rule, Task


class RoundSettings(Protocol):
    """The fields of an experiment that the server reads in a round."""

    @property
    def clients(self) -> int:
        """The number of clients."""

    @property
    def active(self) -> int:
        """The number of clients in a cohort."""

    @property
    def assignment(self) -> str:
        """Whether a capacity belongs to a device or to a slot of the cohort."""

    @property
    def capacity(self) -> str:
        """What a capacity is a share of."""

    @property
    def drop_out(self) -> float:
        """The probability that a client of the cohort never answers."""

    @property
    def weights(self) -> str:
        """How much a client counts."""

    @property
    def uncovered(self) -> str:
        """What becomes of entries that no client trained."""

    @property
    def clip_updates(self) -> float | None:
        """The largest length of a client's update."""

    @property
    def rounds(self) -> int:
        """The number of rounds."""

    @property
    def window(self) -> int:
        """The number of rounds over which coverage is counted."""

    @property
    def evaluation(self) -> str:
        """Where norm statistics come from in evaluations."""

    @property
    def evaluate_every(self) -> int:
        """The rounds between evaluations of the global model."""

    @property
    def local_every(self) -> int | None:
        """The rounds between evaluations of the clients' own models."""


@dataclass(frozen=True, slots=True)
class Setup:
    """An experiment, and the objects that it names.

    Attributes:
        experiment: The fields that a round reads.
        task: What local training needs.
        uses: How often each weight of the model is multiplied for one sample.
        fleet: The capacities, one for each client or slot of the cohort.
        policy: Chooses the sub-model of each client.
        check_capacity: Whether to check what the policy returns, as for a user's own.
        engine: Trains the clients.
        rule: Aggregates the parameters.
        server: The step of the server's optimiser.
        lr: The learning rate of a round.
        privacy: The mechanism of differential privacy.
        mean: Averages norm statistics and measurements.
        process_group: The processes that share the run.
        average: How much the newest model counts in the averaged one.
        noise: Opens a fresh stream of random bytes for privacy.
    """

    experiment: RoundSettings
    task: Task
    uses: Mapping[str, int]
    fleet: Fleet
    policy: Policy
    check_capacity: bool
    engine: Engine
    rule: Rule
    server: ServerStep
    lr: Callable[[int], float]
    privacy: Gaussian | None = None
    mean: Rule = field(default_factory=summable_coverage_mean)
    process_group: ProcessGroup = SINGLE_PROCESS
    average: RateSchedule = field(default_factory=average_none)
    noise: Callable[[], ByteStream] = fresh_stream
