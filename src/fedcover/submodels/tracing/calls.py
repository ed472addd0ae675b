"""One operation of a running module, with its arguments by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True)
class OpCall:
    """An operation with its arguments, its result, and the part of the module that called it."""

    func: OpOverload
    arguments: dict[str, Any]
    out: Any
    location: str

    @property
    def name(self) -> str:
        """Return the operation's plain name, the same for its in-place form."""
        return op_name(self.func)

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments, in order."""
        return [tensor for value in self.arguments.values() for tensor in tensors_in(value)]

    @property
    def outputs(self) -> list[Tensor]:
        """Return all tensors in the result."""
        return tensors_in(self.out)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or a default if the operation has no such argument."""
        return self.arguments.get(name, default)

    def explain(self, reason: str) -> str:
        """Return a message that names the operation and its location."""
        return f"operation {self.name!r} in {self.location}: {reason}"


def op_name(func: OpOverload) -> str:
    """Return an operation's name without its overload and its in-place suffix."""
    name: str = func._schema.name.partition("::")[2]
    return name if name.startswith("__") else name.rstrip("_")


def bind_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by their names in the operation's schema, defaults included."""
    parameters = func._schema.arguments
    arguments = {parameter.name: parameter.default_value for parameter in parameters}
    for parameter, value in zip(parameters, args, strict=False):
        arguments[parameter.name] = value
    return {**arguments, **kwargs}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those in a nested list or tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for element in value for tensor in tensors_in(element)]
    return []
