"""Which indices of which axes stand or fall together: a union-find whose class 0 can never be cut."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FIXED = 0
"""The atom of everything that is always there."""


class UnionFind:
    """Numbers for the indices of axes, merged class by class as operations couple them.

    >>> atoms = UnionFind()
    >>> rows, columns = atoms.new(3), atoms.new(3)
    >>> atoms.tie(rows, columns)
    >>> atoms.fix(rows[:1])
    >>> atoms.roots(columns).tolist()
    [0, 2, 3]
    """

    def __init__(self) -> None:
        self._parent = torch.zeros(1, dtype=torch.int64)
        self.tracking_paused = False

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Compute with atoms while a module is being followed, without following that too."""
        before, self.tracking_paused = self.tracking_paused, True
        try:
            yield
        finally:
            self.tracking_paused = before

    def new(self, number: int) -> Tensor:
        """Atoms that are coupled to nothing yet."""
        first = len(self._parent)
        fresh = torch.arange(first, first + number)
        self._parent = torch.cat([self._parent, fresh])
        return fresh

    def roots(self, atoms: Tensor) -> Tensor:
        """The class of each atom, named by its smallest member."""
        return self._parent[atoms]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Couple two sets of atoms index by index (they broadcast)."""
        left, right = self.roots(left), self.roots(right)
        together = (left + 0 * right).flatten().tolist(), (right + 0 * left).flatten().tolist()
        pairs = sorted({(a, b) for a, b in zip(*together, strict=True) if a != b})
        if not pairs:
            return
        parent: dict[int, int] = {}

        def root(atom: int) -> int:
            while atom in parent:
                atom = parent[atom]
            return atom

        for a, b in pairs:
            low, high = sorted((root(a), root(b)))
            if low != high:
                parent[high] = low  # the smallest wins, so that 0 stays the root of what is fixed
        moved = torch.tensor(list(parent))
        target = torch.arange(len(self._parent))
        target[moved] = torch.tensor([root(atom) for atom in parent])
        self._parent = target[self._parent]

    def fix(self, atoms: Tensor) -> None:
        """Say that these can never be cut."""
        self.tie(atoms, torch.zeros((), dtype=torch.int64))
