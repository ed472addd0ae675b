"""Which unit each element of each tensor belongs to, while a module runs.

A tensor carries fields. A field says, for every element, the atom on which it depends; an element is there if the
atoms of all its fields are. A weight starts with one field per axis, an input has none: it is always there.
Fields are stored thin: of length 1 along the axes on which they do not vary.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


Field = Tensor
Shape = Sequence[int]


@dataclass(frozen=True)
class UncuttableOp:
    """An operation that has no cut version, and the atoms that must therefore turn out to be fixed."""

    message: str
    atoms: Tensor


class UnitLabels:
    """The fields of all tensors that are alive, and how operations tie them."""

    def __init__(self) -> None:
        self.atoms = UnionFind()
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.use_order: list[str] = []
        self.uncuttable_ops: list[UncuttableOp] = []
        self._fields: MutableMapping[Tensor, list[Field]] = WeakTensorKeyDictionary()
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def register(self, name: str, tensor: Tensor) -> None:
        """Let every axis of a module's tensor be cuttable until something says otherwise."""
        self._names[tensor] = name
        for axis, atoms in self.new_fields(tensor).items():
            self.axes[name, axis] = atoms

    def is_registered(self, tensor: Tensor) -> bool:
        """Whether a tensor is the module's own."""
        return tensor in self._names

    def new_fields(self, tensor: Tensor) -> dict[int, Tensor]:
        """Give a tensor one new field per axis; an axis of length 1 cannot be cut."""
        atoms = {
            axis: self.atoms.new(length) for axis, length in enumerate(tensor.shape) if length > 1
        }
        self._fields[tensor] = [
            field_along(each, axis, tensor.ndim) for axis, each in atoms.items()
        ]
        return atoms

    def of(self, tensor: Tensor) -> list[Field]:
        """The fields of a tensor as they are known by now; none where all of it is fixed."""
        if tensor in self._names and self._names[tensor] not in self.use_order:
            self.use_order.append(self._names[tensor])
        return self.simplify(self._fields.get(tensor, []))

    def set_fields(self, tensor: Tensor, fields: Iterable[Field]) -> None:
        """Say what a new tensor's elements depend on."""
        self._fields[tensor] = self.simplify(fields)

    def simplify(self, fields: Iterable[Field]) -> list[Field]:
        """Fields by class, thin, without those that say nothing and without doubles."""
        kept: list[Field] = []
        for field in fields:
            found = thin(self.atoms.roots(field))
            if found.numel() == 1:
                self.atoms.fix(found)  # one unit for all of a tensor: there is nothing to choose
            elif not any(torch.equal(found, other) for other in kept):
                kept.append(found)
        return [field for field in kept if bool(field.any())]

    def broadcast_fields(self, operands: Sequence[tuple[Shape, Sequence[Field]]]) -> list[Field]:
        """Couple tensors that meet element by element (they broadcast); the fields of the result."""
        rank = max((len(shape) for shape, _ in operands), default=0)
        shapes = [(1,) * (rank - len(shape)) + tuple(shape) for shape, _ in operands]
        fields = [
            self.simplify(with_leading_axes(field, rank) for field in each) for _, each in operands
        ]
        for i, mine in enumerate(fields):
            for theirs in fields[i + 1 :]:
                for f in mine:
                    for g in theirs:
                        if varying_axes(f) & varying_axes(g):
                            self.atoms.tie(f, g)
        fields = [self.simplify(each) for each in fields]
        for i, mine in enumerate(fields):
            for j, theirs in enumerate(fields):
                for f in mine if i != j else ():
                    alone = not any(varying_axes(f) & varying_axes(g) for g in theirs)
                    if alone and any(shapes[j][axis] > 1 for axis in varying_axes(f)):
                        self.atoms.fix(f)  # the other tensor is always there along this axis
        return self.simplify(field for each in fields for field in each)

    def reduce_sum(self, fields: Iterable[Field], axes: Iterable[int]) -> list[Field]:
        """The fields of a sum over some axes (which stay, with length 1).

        Units that lie along the summed axes alone are used up; what varies across them too is kept or cut whole.
        """
        gone, kept = set(axes), []
        for field in self.simplify(fields):
            if varying_axes(field) - gone:
                self.collapse(field, gone)
                kept.append(field)
        return [thin_along(field, gone) for field in self.simplify(kept)]

    def collapse(self, field: Field, axes: Iterable[int]) -> None:
        """Let the units along some axes be kept or cut together."""
        self.atoms.tie(field, thin_along(field, axes))

    def add_uncuttable(self, message: str, fields: Iterable[Field]) -> None:
        """Remember that an operation cannot be cut along these fields."""
        self.uncuttable_ops += [UncuttableOp(message, field.flatten()) for field in fields]


def field_along(atoms: Tensor, axis: int, rank: int) -> Field:
    """The field of a tensor whose units lie along one axis."""
    return atoms.view([-1 if each == axis else 1 for each in range(rank)])


def with_leading_axes(field: Field, rank: int) -> Field:
    """The same field with axes of length 1 in front, as broadcasting adds them."""
    return field[(None,) * (rank - field.ndim)]


def varying_axes(field: Field) -> set[int]:
    """The axes along which a thin field varies."""
    return {axis for axis, length in enumerate(field.shape) if length > 1}


def thin(field: Field) -> Field:
    """The field with length 1 along the axes on which it does not vary."""
    for axis, length in enumerate(field.shape):
        if length > 1 and bool((field == field.narrow(axis, 0, 1)).all()):
            field = field.narrow(axis, 0, 1)
    return field


def thin_along(field: Field, axes: Iterable[int]) -> Field:
    """The field at the first place of some axes."""
    for axis in axes:
        field = field.narrow(axis, 0, 1)
    return field
