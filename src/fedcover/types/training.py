"""Define local training, the state of a run, and the engines and rules that work on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedcover.types.data import ClientInfo, Source
from fedcover.types.model import Model, Params, Reduction
from fedcover.types.rounds import Client, Coverage


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How a client trains its sub-model: epochs of SGD on its own rows."""

    epochs: int = 5
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 0.0
    clip: float | None = None
    augment: str = "none"


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of one local step; `step`, a 0-d tensor, counts the steps of this round."""

    x: Tensor
    y: Tensor
    step: Tensor


Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""The client's sub-model as a function of its parameters and a batch of inputs."""

Carry = Any
"""What a recipe remembers while a client trains: a tree (dicts, tuples and lists) of tensors only.

Engines stack the trees of several clients.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recipe returns at the end of local training.

    Attributes:
        params: The trained parameters.
        bits: Masks of the entries that count as trained, in the client's own shapes. All entries
            of a tensor without a mask count.
        measured: Tensors by kind and name, which the server averages for later rounds.
        private: Tensors that stay on the client.
    """

    params: Params
    bits: Mapping[str, Tensor] = field(default_factory=dict)
    measured: dict[str, Params] = field(default_factory=dict)
    private: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Local training as pure functions, of which only the loss is required.

    `loss` and `observe` must not branch on the values of tensors: engines capture a step once and
    replay it for other clients.

    Attributes:
        loss: The loss of one batch.
        start: Create the carry from the assignment and the parameters that were sent.
        observe: Update the carry with the gradients of a step, before they are masked.
        finish: Create the outcome from the trained parameters.
        model: Transform the global model before the first round.
        exits: Whether the model returns the stacked logits of several exits.
        measures: What clients measure, and of which tensors: `all`, `prunable` or `round` (the
            number of the round, from 1, at the entries inside the mask; 0 elsewhere).
        chooses: Whether the trained entries depend on client data. Such a recipe cannot be combined
            with differential privacy.
    """

    loss: Callable[[Forward, Params, Batch, Carry], Tensor]
    start: Callable[["Assignment", Params], Carry] = lambda assignment, params: ()
    observe: Callable[[Carry, Params], Carry] = lambda carry, gradients: carry
    finish: Callable[["Assignment", Forward, Params, Carry], Outcome] = (
        lambda _, forward, params, __: Outcome(params)
    )
    model: Callable[[Model], Model] = lambda model: model
    exits: bool = False
    measures: Mapping[str, str] = field(default_factory=dict)
    chooses: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """The part of the local training setup that all clients of a round share."""

    model: Model
    source: Source
    local: LocalTraining
    recipe: Recipe
    measure: str
    norm: str
    scaler: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Update:
    """What a client returns.

    Attributes:
        client: The client.
        sent: The part of the model that the client received.
        trained: The part of the model that the client counts as trained.
        params: The trained parameters.
        buffers: The norm statistics after training.
        measured: What the client measured, by kind and tensor.
        private: Tensors that stay on the client.
        loss: The mean training loss of the last epoch.
    """

    client: Client
    sent: Reduction
    trained: Reduction
    params: Params
    buffers: Params
    measured: dict[str, Params]
    private: Params
    loss: float


@dataclass(frozen=True, slots=True)
class State:
    """The complete state of a run after `round` rounds.

    Attributes:
        round: The number of completed rounds.
        params: The global parameters.
        statistics: Running norm statistics, by width where they are tracked per width.
        coverage: How often each parameter was trained.
        measured: What clients measured last, by kind and tensor.
        server: The tensors of the server optimiser.
        private: The tensors that each client keeps, by client.
        average: The mean of the parameters over rounds; empty if the experiment keeps none.
    """

    round: int
    params: Params
    statistics: dict[str, Params] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=lambda: Coverage((), {}))
    measured: dict[str, Params] = field(default_factory=dict)
    server: dict[str, Params] = field(default_factory=dict)
    private: dict[int, Params] = field(default_factory=dict)
    average: dict[str, Params] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a client receives for a round."""

    task: Task
    state: State
    client: Client
    reduction: Reduction

    @property
    def private(self) -> Params:
        """Return the tensors that the client kept in earlier rounds."""
        return self.state.private.get(self.client.id, {})

    @property
    def steps(self) -> int:
        """Return the number of local steps of the client."""
        steps_per_epoch = -(-self.client.samples // self.task.local.batch_size)
        return self.task.local.epochs * steps_per_epoch


class EngineFunction(Protocol):
    """Train clients, starting from a state."""

    def __call__(
        self, task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float
    ) -> Iterable[Update]:
        """Return one update for each client that has been trained, in any order."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Train the clients of a round; engines differ in speed only, and all agree with `sequential`.

    A plain function is an engine too: `fedcover.training.engines.as_engine` turns it into this
    type. The defaults are those of an engine that trains all clients in this process.

    Attributes:
        train: Trains the given clients, starting from the given state.
        members: Returns the clients that can be reached in a round, each with the capacity that
            its device declares, or None where it declares none; None if all clients can be reached.
        round_metrics: Returns what the engine adds to the metrics of the last round.
        client_info: What other machines report about their clients' rows, by client. It grows as
            they report. None if all rows are in this process.
    """

    train: EngineFunction
    members: Callable[[int], Mapping[int, float | None] | None] = lambda round: None
    round_metrics: Callable[[], Mapping[str, Any]] = dict
    client_info: Mapping[int, ClientInfo] | None = None

    def __call__(
        self, task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float
    ) -> Iterable[Update]:
        """Train the given clients, starting from the given state."""
        return self.train(task, state, work, lr)


class Rule(Protocol):
    """Combine the clients' tensors into new global ones, independently of the architecture."""

    def __call__(self, old: Params, updates: Iterable[tuple[Reduction, Params, float]]) -> Params:
        """Return the new tensors; an update is a part of the model, its values and a weight."""
