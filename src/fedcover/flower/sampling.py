"""How many of the connected nodes take part in a round, in the words of Flower."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.errors import InvalidValue
from fedcover.rng import numpy_generator


@dataclass(frozen=True, slots=True)
class Sampling:
    """The fractions of the nodes that train and evaluate, and the minimum numbers of each.

    Args:
        fraction_train: The fraction of the nodes that trains in a round.
        fraction_evaluate: The fraction of the nodes that evaluates after a round; 0 for none.
        min_train_nodes: The least number of nodes that train, if as many are connected.
        min_evaluate_nodes: The least number of nodes that evaluate, if as many are connected.
        min_available_nodes: How many nodes must be connected before a round begins.
        wait: Seconds to wait for these.

    Raises:
        InvalidValue: If a value is out of range.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 0.0
    min_train_nodes: int = 1
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 1
    wait: float = 60.0

    def __post_init__(self) -> None:
        """Check the values."""
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
        """Draw the partitions that train in a round.

        >>> Sampling(fraction_train=0.5, min_train_nodes=3).to_train(range(4), seed=0, round=0)
        [0, 1, 3]

        Args:
            partition_ids: The partitions whose nodes are connected.
            seed: The seed of the run.
            round: The number of the round, from 0.

        Returns:
            The drawn partitions, in order.
        """
        count = _sample_size(len(partition_ids), self.fraction_train, self.min_train_nodes)
        return _sample(partition_ids, count, seed, "train", round)

    def to_evaluate(self, partition_ids: Sequence[int], seed: int, round: int) -> list[int]:
        """Draw the partitions that evaluate after a round.

        Args:
            partition_ids: The partitions whose nodes are connected.
            seed: The seed of the run.
            round: The number of the round, from 0.

        Returns:
            The drawn partitions, in order; none if `fraction_evaluate` is 0.
        """
        if self.fraction_evaluate == 0:
            return []
        count = _sample_size(len(partition_ids), self.fraction_evaluate, self.min_evaluate_nodes)
        return _sample(partition_ids, count, seed, "evaluate", round)


def _sample_size(available: int, fraction: float, minimum: int) -> int:
    return min(available, max(int(fraction * available), minimum))


def _sample(
    partition_ids: Sequence[int], count: int, seed: int, purpose: str, round: int
) -> list[int]:
    generator = numpy_generator(seed, "nodes", purpose, round)
    indices = generator.choice(len(partition_ids), size=count, replace=False)
    return [partition_ids[index] for index in sorted(indices.tolist())]
