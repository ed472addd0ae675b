"""Which of the nodes that are there take part in a round of an app of one's own; words and meaning as in Flower."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.errors import InvalidValue
from fedcover.rng import numpy_generator


@dataclass(frozen=True, slots=True)
class Sampling:
    """The share of the nodes that trains, and the share that evaluates, with the least numbers of each.

    Args:
        fraction_train: The share of the nodes that trains in a round.
        fraction_evaluate: The share of the nodes that evaluates after a round; 0 for none.
        min_train_nodes: How many train at least, if so many are there.
        min_evaluate_nodes: How many evaluate at least, if so many are there.
        min_available_nodes: How many must be there before a round begins.
        wait: Seconds to wait for these.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 0.0
    min_train_nodes: int = 1
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 1
    wait: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 < self.fraction_train <= 1:
            raise InvalidValue(f"fraction_train must be in (0, 1]; got {self.fraction_train}")
        if not 0 <= self.fraction_evaluate <= 1:
            raise InvalidValue(f"fraction_evaluate must be in [0, 1]; got {self.fraction_evaluate}")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidValue(f"{name} must be a whole number of at least 1; got {value!r}")
        if not 0 <= self.wait < math.inf:
            raise InvalidValue(f"wait must be a number of seconds of at least 0; got {self.wait}")

    def to_train(self, partition_ids: Sequence[int], seed: int, round: int) -> list[int]:
        """The places that train in a round, in order.

        >>> Sampling(fraction_train=0.5, min_train_nodes=3).to_train(range(4), seed=0, round=0)
        [0, 1, 3]
        """
        return _drawn(
            partition_ids, self.fraction_train, self.min_train_nodes, seed, "train", round
        )

    def to_evaluate(self, partition_ids: Sequence[int], seed: int, round: int) -> list[int]:
        """The places that evaluate after a round, in order; none if nobody is to."""
        if self.fraction_evaluate == 0:
            return []
        return _drawn(
            partition_ids, self.fraction_evaluate, self.min_evaluate_nodes, seed, "evaluate", round
        )


def _drawn(
    partition_ids: Sequence[int], fraction: float, least: int, seed: int, kind: str, round: int
) -> list[int]:
    count = min(len(partition_ids), max(int(fraction * len(partition_ids)), least))
    drawn = numpy_generator(seed, "nodes", kind, round).choice(
        len(partition_ids), size=count, replace=False
    )
    return [partition_ids[index] for index in sorted(drawn.tolist())]
