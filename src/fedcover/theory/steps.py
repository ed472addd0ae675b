"""What T local steps with fresh momentum add up to: how much each gradient counts in the end.

With momentum mu the velocity is v_t = mu v_(t-1) + g_t, from v_0 = 0, and theta_t = theta_(t-1) - gamma v_t. So after T
steps gradient j has moved the model by gamma c_j g_j with c_j = 1 + mu + .. + mu^(T-j). Without momentum all c_j are 1.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LocalSteps:
    """T local steps of SGD with momentum mu that starts afresh in every round.

    >>> LocalSteps(300).total, LocalSteps(3, momentum=0.5).shares.tolist()
    (300.0, [1.75, 1.5, 1.0])
    """

    count: int
    momentum: float = 0.0

    @cached_property
    def shares(self) -> np.ndarray:
        """c_j: how much gradient j counts in the end."""
        left_T = np.arange(self.count, 0, -1)
        return np.asarray((1 - self.momentum**left_T) / (1 - self.momentum))

    @property
    def total(self) -> float:
        """S, the sum of all c_j: T without momentum."""
        return float(self.shares.sum())

    @property
    def squares(self) -> float:
        """The sum of c_j^2, over S: 1 without momentum."""
        return float((self.shares**2).sum()) / self.total

    @cached_property
    def drift(self) -> float:
        """How far T steps of unit length lead away at most: the mean of squared distances, weighted by c_j / S.

        Before gradient j is taken, at most S_(j-1) has been walked, the total of j - 1 steps. Without momentum this is
        (T-1)(2T-1)/6.

        >>> LocalSteps(10).drift == 9 * 19 / 6
        True
        """
        walked_T = np.concatenate([[0.0], np.cumsum(self.shares[::-1])[:-1]])
        return float((self.shares * walked_T**2).sum()) / self.total
