"""Sizes that remember where they come from: a module's own numbers and the lengths of axes.

`view(B, T, self.num_heads, C // self.num_heads)` promises that an axis has as many entries as a number says. A number
that counts units must therefore shrink with them, and a number that cannot shrink keeps its axis whole.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fedcover.submodels.tracing.atoms import Atoms

Arithmetic = Callable[["Number", int], Any]


def aside(operation: Arithmetic) -> Arithmetic:
    """Let arithmetic with sizes go unnoticed by those who follow the module's operations."""

    @wraps(operation)
    def unnoticed(number: "Number", other: int) -> Any:
        with number.atoms.aside():
            return operation(number, other)

    return unnoticed


class Number(int):
    """A size with one atom for each thing that it counts; plain arithmetic keeps track of them.

    >>> atoms = Atoms()
    >>> heads = Number.of(atoms, atoms.new(4))
    >>> width = heads * 3
    >>> int(width), width.counted.tolist()
    (12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4])
    """

    atoms: Atoms
    counted: Tensor

    @classmethod
    def of(cls, atoms: Atoms, counted: Tensor) -> "Number":
        """The number of things that these atoms stand for."""
        number = cls(len(counted))
        number.atoms, number.counted = atoms, counted
        return number

    @property
    def constant(self) -> bool:
        """Whether nothing that it counts can be cut."""
        return not bool(self.atoms.roots(self.counted).any())

    def fix(self) -> None:
        """Say that it stays what it is."""
        self.atoms.fix(self.counted)

    def _like(self, other: int) -> "Number":
        return other if isinstance(other, Number) else Number.of(self.atoms, torch.zeros(int(other), dtype=torch.int64))

    def _count(self, counted: Tensor) -> "Number":
        return Number.of(self.atoms, counted)

    @aside
    def __add__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) + other
        return self._count(torch.cat([self.counted, self._like(other).counted]))

    @aside
    def __radd__(self, other: int) -> Any:
        return self._like(other) + self if isinstance(other, int) and other >= 0 else other + int(self)

    @aside
    def __sub__(self, other: int) -> Any:
        if not isinstance(other, int) or not 0 <= other <= self:
            return int(self) - other
        self.atoms.tie(self.counted[: int(other)], self._like(other).counted)
        return self._count(self.counted[int(other) :])

    @aside
    def __mul__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 0:
            return int(self) * other
        inner = self._like(other)
        if self.constant:
            return self._count(inner.counted.repeat(int(self)))
        inner.fix()  # products are written in the order of the axes: many times something whole
        return self._count(self.counted.repeat_interleave(int(inner)))

    @aside
    def __rmul__(self, other: int) -> Any:
        return self._like(other) * self if isinstance(other, int) and other >= 0 else other * int(self)

    @aside
    def __floordiv__(self, other: int) -> Any:
        if not isinstance(other, int) or other < 1 or int(self) % int(other):
            return int(self) // other
        parts = self.counted.view(int(other), -1)
        if isinstance(other, Number) and not other.constant:
            self.atoms.tie(parts, other.counted[:, None])  # so many wholes, each of a size that stays
            return self._count(torch.zeros(parts.shape[1], dtype=torch.int64))
        self.atoms.tie(parts, parts[:1])  # a fixed number of equal parts
        return self._count(parts[0])

    @aside
    def __rfloordiv__(self, other: int) -> Any:
        return self._like(other) // self if isinstance(other, int) and other >= 0 else other // int(self)

    def __deepcopy__(self, memo: object) -> "Number":
        return self

    __hash__ = int.__hash__


def plain(value: Any) -> Any:
    """A value with every Number in it as an ordinary int."""
    if isinstance(value, Number):
        return int(value)
    if isinstance(value, torch.Size):
        return torch.Size([int(each) for each in value])
    if type(value) in (list, tuple):
        return type(value)(plain(each) for each in value)
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return {key: plain(each) for key, each in value.items()} if type(value) is dict else value
