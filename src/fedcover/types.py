"""The nouns of fedcover and the shapes of its functions: every other file is verbs on these."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]
"""Tensors of a model by name: the whole model's, or a client's part of them."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and labels that belong together, row by row."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Samples":
        """The same samples on another device."""
        return Samples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set: normalised inputs, labels 0..classes-1, and who owns each training row, if known."""

    name: str
    train: Samples
    test: Samples
    classes: int
    owner: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One client's data: the rows `index` of `samples`, which other clients may share."""

    samples: Samples
    index: Tensor


class Source(Protocol):
    """Where the clients' data comes from; asked for the clients of a round only, so it may be lazy."""

    @property
    def test(self) -> Samples:
        """The common test set."""

    @property
    def validation(self) -> Samples | None:
        """Held-out training samples, for everything that is selected."""

    @property
    def calibration(self) -> Tensor:
        """Inputs on which the norm statistics of an evaluated model are computed."""

    @property
    def classes(self) -> int:
        """How many labels there are."""

    def count(self, client: int) -> int:
        """How many training rows one client has."""

    def shard(self, client: int) -> Shard:
        """The training rows of one client."""

    def labels(self, client: int) -> tuple[int, ...]:
        """The distinct labels that one client holds, in order."""


# ── the model and its parts ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a group's units live in one tensor: unit u owns [start + u*per_unit, start + (u+1)*per_unit) of the axis.

    Without an axis the whole tensor goes with one `unit` (a stage of a network, an exit).
    """

    tensor: str
    axis: int | None
    start: int = 0
    per_unit: int = 1
    unit: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A number that a module keeps (`blocks.0.attention.num_heads`), and how much of it one unit is."""

    attribute: str
    per_unit: int = 1


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units (neurons, channels, heads) that are kept or cut together, wherever they appear and are counted.

    The units of a `nested` group stand on each other: only the first can be kept. `buffers`: cuts of norm statistics.
    """

    name: str
    size: int
    cuts: tuple[Cut, ...]
    nested: bool = False
    counts: tuple[Count, ...] = ()
    buffers: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """An ordinary module, the groups in which its units are cut, and the weights that pruning may touch.

    `classifier`: tensors whose first axis is the labels; `exits`: by exit, the parameters that no deeper exit uses.
    """

    module: nn.Module
    groups: tuple[UnitGroup, ...]
    prunable: tuple[str, ...] = ()
    classifier: tuple[str, ...] = ()
    exits: tuple[tuple[str, ...], ...] = ()


class Reduction(Protocol):
    """A client's part of the model: `Slices` (sub-shaped, really smaller) or `Masks` (unstructured)."""

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """The part of each tensor that travels to the client."""

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add `scale * values` (or `scale` itself) to the entries of `target` that the client holds."""

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """True where the client holds the entry, in the full shapes."""

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """What local gradients are multiplied by; empty where the sub-model's shape already says it."""

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many entries of each tensor the client holds."""


# ── clients and rounds ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Client:
    """A device in one round: its capacity in (0, 1], its place in the cohort and what it knows."""

    id: int
    capacity: float
    slot: int
    samples: int
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many clients trained each parameter: in each of the last rounds (newest last), and ever."""

    window: tuple[Params, ...]
    ever: Params


@dataclass(frozen=True, slots=True)
class View:
    """All that a policy may look at. Policies are pure: same view, same reductions.

    `levels` are the fleet's capacities, `measure` what they are a share of; `measured` is what clients reported, `uses`
    how often each weight is multiplied for one sample, `classifier` the model's own. Only a policy with a
    `GrowthStep` is told `rounds`, how many there will be.
    """

    round: int
    params: Params
    groups: tuple[UnitGroup, ...]
    prunable: tuple[str, ...]
    cohort: tuple[Client, ...]
    levels: tuple[float, ...]
    measure: str
    coverage: Coverage
    seed: int
    measured: dict[str, Params] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    classifier: tuple[str, ...] = ()
    rounds: int | None = None


class Policy(Protocol):
    """Gives every client of a cohort its reduction, in the cohort's order; None lets a client sit out."""

    def __call__(self, view: View) -> Sequence[Reduction | None]:
        """One reduction, or None, per client."""


GrowthStep = Callable[[View], Callable[[Params], Params] | None]
"""How the model is changed before a round: a function of its tensors (and of what belongs to them), mostly none."""


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """What a client does with its sub-model: epochs of SGD on its own rows."""

    epochs: int = 5
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 0.0
    clip: float | None = None
    augment: str = "none"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one local step sees; `step` counts the client's steps in this round, as a tensor without axes."""

    x: Tensor
    y: Tensor
    step: Tensor


Forward = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""The client's sub-model as a function of its parameters and a batch of inputs."""

Carry = Any
"""What a recipe remembers while one client trains: a tree (tuples and dicts) of tensors only; engines stack them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client makes of its trained parameters.

    `bits` says, in the client's own shapes, which entries it counts as trained (all of those that are not named);
    `measured` are tensors by name and kind that the server averages for later rounds; `private` stays with it.
    """

    params: Params
    bits: Mapping[str, Tensor] = field(default_factory=dict)
    measured: dict[str, Params] = field(default_factory=dict)
    private: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What a local step is: pure functions, of which only the loss is needed.

    `start` sees what the client was given, `observe` every step's gradients before they are masked, `finish` the end;
    `model` is what the recipe makes of the global model before the first round. `loss` and `observe` decide nothing by
    the values of tensors: their steps are captured once and replayed for other clients. With `exits` the model gives
    the logits of several exits, stacked. `measures`: what clients measure, of which tensors (`all`, `prunable`;
    `round`: its number, from 1, in the mask, else 0); `chooses`: they decide by data what they train, so no privacy.
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
    """Everything about local training that is the same for all clients of a round."""

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
    """What comes back from a client: its part of the parameters, what of it it trained, and what it measured."""

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
    """The whole memory of a run after `round` rounds.

    `statistics`: running norm statistics, by width where they are tracked; `measured`: what clients measured last;
    `server`: the server optimiser's tensors; `private`: what each client keeps for itself.
    """

    round: int
    params: Params
    statistics: dict[str, Params] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=lambda: Coverage((), {}))
    measured: dict[str, Params] = field(default_factory=dict)
    server: dict[str, Params] = field(default_factory=dict)
    private: dict[int, Params] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a client has been given for a round."""

    task: Task
    state: State
    client: Client
    reduction: Reduction

    @property
    def private(self) -> Params:
        """What the client kept for itself in earlier rounds."""
        return self.state.private.get(self.client.id, {})

    @property
    def steps(self) -> int:
        """How many local steps the client will make."""
        return self.task.local.epochs * -(-self.client.samples // self.task.local.batch_size)


class Engine(Protocol):
    """How fast, never what: every engine agrees with `sequential`."""

    def __call__(
        self, task: Task, state: State, work: Sequence[tuple[Client, Reduction]], lr: float
    ) -> Iterable[Update]:
        """Train the given clients from the given state."""


class Rule(Protocol):
    """New global tensors from old ones and what the clients trained; knows no architecture."""

    def __call__(self, old: Params, parts: Iterable[tuple[Reduction, Params, float]]) -> Params:
        """Combine what came back, each part with its weight."""
