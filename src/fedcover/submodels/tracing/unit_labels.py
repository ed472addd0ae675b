"""Track which unit each element of each tensor belongs to, while a module runs.

Every index of a tensor's axis gets a number, its atom. Atoms that operations couple are merged into
one class, which becomes a unit. A tensor has fields. A field gives, for every element, one atom
that it depends on; an element is present if the atoms of all its fields are. A weight starts with
one field per axis. An input has none: it is always present. Fields are stored thin, with length 1
along the axes on which they do not vary.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

FIXED = 0
"""The atom of everything that is always present."""


class UnionFind:
    """Atoms in classes, which are merged as operations couple them.

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
        """Compute with atoms, while a module is traced, without tracing that computation too."""
        before, self.tracking_paused = self.tracking_paused, True
        try:
            yield
        finally:
            self.tracking_paused = before

    def new(self, number: int) -> Tensor:
        """Return new atoms that are not coupled to anything yet."""
        first = len(self._parent)
        atoms = torch.arange(first, first + number)
        self._parent = torch.cat([self._parent, atoms])
        return atoms

    def roots(self, atoms: Tensor) -> Tensor:
        """Return the class of each atom, named by its smallest member."""
        return self._parent[atoms]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Couple two sets of atoms element by element (they broadcast)."""
        left, right = self.roots(left), self.roots(right)
        left_roots = (left + 0 * right).flatten().tolist()
        right_roots = (right + 0 * left).flatten().tolist()
        pairs = sorted({(a, b) for a, b in zip(left_roots, right_roots, strict=True) if a != b})
        if not pairs:
            return
        parent: dict[int, int] = {}

        def find(atom: int) -> int:
            while atom in parent:
                atom = parent[atom]
            return atom

        for a, b in pairs:
            low, high = sorted((find(a), find(b)))
            if low != high:
                parent[high] = low  # the smallest wins, so that 0 stays the root of fixed atoms
        merged = torch.tensor(list(parent))
        new_root = torch.arange(len(self._parent))
        new_root[merged] = torch.tensor([find(atom) for atom in parent])
        self._parent = new_root[self._parent]

    def fix(self, atoms: Tensor) -> None:
        """Mark atoms that can never be cut."""
        self.tie(atoms, torch.zeros((), dtype=torch.int64))


Field = Tensor
Shape = Sequence[int]


@dataclass(frozen=True)
class UncuttableOp:
    """An operation that has no cut version, and the atoms that must therefore not be cut."""

    message: str
    atoms: Tensor


class UnitLabels:
    """The fields of all live tensors, coupled as operations require."""

    def __init__(self) -> None:
        self.atoms = UnionFind()
        self.axes: dict[tuple[str, int], Tensor] = {}
        self.use_order: list[str] = []
        self.uncuttable_ops: list[UncuttableOp] = []
        self._fields: MutableMapping[Tensor, list[Field]] = WeakTensorKeyDictionary()
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def register(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of the module; every axis can be cut until an operation prevents it."""
        self._names[tensor] = name
        for axis, atoms in self.new_fields(tensor).items():
            self.axes[name, axis] = atoms

    def is_registered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the module's own."""
        return tensor in self._names

    def new_fields(self, tensor: Tensor) -> dict[int, Tensor]:
        """Give a tensor one new field per axis; an axis of length 1 cannot be cut."""
        atoms_by_axis = {
            axis: self.atoms.new(length) for axis, length in enumerate(tensor.shape) if length > 1
        }
        self._fields[tensor] = [
            field_along(atoms, axis, tensor.ndim) for axis, atoms in atoms_by_axis.items()
        ]
        return atoms_by_axis

    def of(self, tensor: Tensor) -> list[Field]:
        """Return the current fields of a tensor; there are none if all of it is fixed."""
        if tensor in self._names and self._names[tensor] not in self.use_order:
            self.use_order.append(self._names[tensor])
        return self.simplify(self._fields.get(tensor, []))

    def set_fields(self, tensor: Tensor, fields: Iterable[Field]) -> None:
        """Set the fields of a new tensor."""
        self._fields[tensor] = self.simplify(fields)

    def simplify(self, fields: Iterable[Field]) -> list[Field]:
        """Return thin fields of roots, without duplicates and without fields that are all fixed."""
        distinct: list[Field] = []
        for field in fields:
            roots = thin(self.atoms.roots(field))
            if roots.numel() == 1:
                self.atoms.fix(roots)  # one unit for all of a tensor: nothing can be cut
            elif not any(torch.equal(roots, other) for other in distinct):
                distinct.append(roots)
        return [field for field in distinct if bool(field.any())]

    def broadcast_fields(self, operands: Sequence[tuple[Shape, Sequence[Field]]]) -> list[Field]:
        """Couple tensors that are combined element by element, with broadcasting.

        Returns:
            The fields of the result.
        """
        rank = max((len(shape) for shape, _ in operands), default=0)
        shapes = [(1,) * (rank - len(shape)) + tuple(shape) for shape, _ in operands]
        fields_by_operand = [
            self.simplify(with_leading_axes(field, rank) for field in fields)
            for _, fields in operands
        ]
        self._tie_along_shared_axes(fields_by_operand)
        fields_by_operand = [self.simplify(fields) for fields in fields_by_operand]
        self._fix_where_others_are_whole(shapes, fields_by_operand)
        return self.simplify(field for fields in fields_by_operand for field in fields)

    def _tie_along_shared_axes(self, fields_by_operand: Sequence[Sequence[Field]]) -> None:
        for i, left_fields in enumerate(fields_by_operand):
            for right_fields in fields_by_operand[i + 1 :]:
                for left in left_fields:
                    for right in right_fields:
                        if varying_axes(left) & varying_axes(right):
                            self.atoms.tie(left, right)

    def _fix_where_others_are_whole(
        self, shapes: Sequence[Shape], fields_by_operand: Sequence[Sequence[Field]]
    ) -> None:
        """Fix units along axes on which another operand has elements that are always present."""
        for i, fields in enumerate(fields_by_operand):
            for j, other_fields in enumerate(fields_by_operand):
                if i == j:
                    continue
                for field in fields:
                    axes = varying_axes(field)
                    if any(axes & varying_axes(other) for other in other_fields):
                        continue
                    if any(shapes[j][axis] > 1 for axis in axes):
                        self.atoms.fix(field)

    def reduce_sum(self, fields: Iterable[Field], axes: Iterable[int]) -> list[Field]:
        """Return the fields of a sum over some axes, which stay with length 1.

        Units along only the summed axes disappear in the sum. Units that also vary along other axes
        are kept or cut whole.
        """
        summed_axes = set(axes)
        remaining: list[Field] = []
        for field in self.simplify(fields):
            if varying_axes(field) - summed_axes:
                self.collapse(field, summed_axes)
                remaining.append(field)
        return [thin_along(field, summed_axes) for field in self.simplify(remaining)]

    def collapse(self, field: Field, axes: Iterable[int]) -> None:
        """Couple all units along some axes, so that they are kept or cut together."""
        self.atoms.tie(field, thin_along(field, axes))

    def add_uncuttable(self, message: str, fields: Iterable[Field]) -> None:
        """Record that an operation cannot be cut along these fields."""
        self.uncuttable_ops += [UncuttableOp(message, field.flatten()) for field in fields]


def field_along(atoms: Tensor, axis: int, rank: int) -> Field:
    """Return the field of a tensor whose units are the indices of one axis."""
    return atoms.view([-1 if i == axis else 1 for i in range(rank)])


def with_leading_axes(field: Field, rank: int) -> Field:
    """Return the same field with axes of length 1 in front, as broadcasting adds them."""
    return field[(None,) * (rank - field.ndim)]


def varying_axes(field: Field) -> set[int]:
    """Return the axes along which a thin field varies."""
    return {axis for axis, length in enumerate(field.shape) if length > 1}


def thin(field: Field) -> Field:
    """Return the field with length 1 along the axes on which it does not vary."""
    for axis, length in enumerate(field.shape):
        if length > 1 and bool((field == field.narrow(axis, 0, 1)).all()):
            field = field.narrow(axis, 0, 1)
    return field


def thin_along(field: Field, axes: Iterable[int]) -> Field:
    """Return the field at the first index of some axes."""
    for axis in axes:
        field = field.narrow(axis, 0, 1)
    return field
