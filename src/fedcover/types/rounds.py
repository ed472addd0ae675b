"""Define clients, the view of a policy, and policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Protocol

from fedcover.types.model import Params, Reduction, UnitGroup


@dataclass(frozen=True, slots=True)
class Client:
    """A client in one round.

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
    """How often each parameter was trained.

    Attributes:
        window: For each of the last rounds, the number of clients per entry; the newest is last.
        ever: True at entries that some client has trained in any round.
    """

    window: tuple[Params, ...]
    ever: Params


@dataclass(frozen=True, slots=True)
class View:
    """Everything that a policy may read.

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
    uses: Mapping[str, int] = field(default_factory=dict)
    classifier: tuple[str, ...] = ()
    rounds: int | None = None


class PolicyFunction(Protocol):
    """Assign a reduction to every client of a cohort, or None to skip the client this round."""

    def __call__(self, view: View) -> Sequence[Reduction | None]:
        """Return one reduction or None per client, in the order of the cohort."""


GrowthStep = Callable[[View], Callable[[Params], Params] | None]
"""Return the change of the model before a round as a function of its tensors, or None.

The same function is applied to all state that has the shapes of the parameters.
"""


class Policy:
    """Decide what every client trains and, in some policies, how the model changes between rounds.

    A function of a view is a policy too: `fedcover.policies.as_policy` turns it into this type. The
    options and the description of a policy are those of its function.

    Attributes:
        assign: A function of a view, with options, that returns one reduction or None per client.
        grow: The `GrowthStep` of the policy, with the same options; None if there is none.
        name: The name of a built-in policy; None for any other.
    """

    def __init__(
        self,
        assign: Callable[..., Sequence[Reduction | None]],
        grow: Callable[..., Callable[[Params], Params] | None] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.assign, self.grow, self.name = assign, grow, name
        update_wrapper(self, assign, updated=())
        if name is not None:
            self.__name__ = self.__qualname__ = name

    def __call__(self, view: View, **options: Any) -> Sequence[Reduction | None]:
        """Return one reduction or None per client, in the order of the cohort."""
        return self.assign(view, **options)

    def with_options(self, **options: Any) -> "Policy":
        """Return the same policy with options bound in both of its functions."""
        grow = None if self.grow is None else partial(self.grow, **options)
        return Policy(partial(self.assign, **options), grow, name=self.name)

    def __repr__(self) -> str:
        return f"policy {self.name or getattr(self.assign, '__name__', self.assign)}"
