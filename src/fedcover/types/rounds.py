"""Define clients, the view of a policy, and policies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedcover.types.model import Params, Reduction, UnitGroup


@dataclass(frozen=True, slots=True)
class Client:
    """Describe a device in one round.

    Attributes:
        id: The number of the client, starting at 0.
        capacity: The share of the model that the device can hold, in (0, 1].
        slot: The position of the client in the cohort of this round.
        samples: The number of its training rows.
        labels: The distinct labels in its training rows.
    """

    id: int
    capacity: float
    slot: int
    samples: int
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Count how often each parameter was trained.

    Attributes:
        window: For each of the last rounds, the number of clients per entry; the newest is last.
        ever: True at entries that some client has trained in any round.
    """

    window: tuple[Params, ...]
    ever: Params


@dataclass(frozen=True, slots=True)
class View:
    """Hold everything that a policy may read.

    Policies are pure: the same view gives the same reductions.

    Attributes:
        round: The number of the round.
        params: The global parameters before the round.
        groups: The unit groups of the model.
        prunable: The names of the weights that unstructured pruning may remove.
        cohort: The clients of this round.
        levels: The distinct capacities of the fleet, largest first.
        measure: What a capacity is a share of.
        coverage: How often each parameter was trained so far.
        seed: The seed of the experiment.
        measured: What clients reported in earlier rounds, by kind and tensor.
        uses: How often each weight is multiplied for one sample.
        classifier: The names of the tensors whose first axis is the label.
        rounds: The total number of rounds; set only for policies that define a `GrowthStep`.
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
    """Assign a reduction to every client of a cohort, or None to skip the client this round."""

    def __call__(self, view: View) -> Sequence[Reduction | None]:
        """Return one reduction or None per client, in the order of the cohort."""


GrowthStep = Callable[[View], Callable[[Params], Params] | None]
"""Return the change of the model before a round as a function of its tensors, or None.

The same function is applied to all state that has the shapes of the parameters.
"""
