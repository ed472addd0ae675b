"""One operation of a running module, with its arguments by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True)
class OpCall:
    """An operation as it was called: who called it, with what, and what came out."""

    func: OpOverload
    arguments: dict[str, Any]
    out: Any
    location: str

    @property
    def name(self) -> str:
        """The operation's plain name, the same for its in-place form."""
        return op_name(self.func)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [t for value in self.arguments.values() for t in tensors_in(value)]

    @property
    def outputs(self) -> list[Tensor]:
        """All tensors that came out."""
        return tensors_in(self.out)

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or what it is if it was not given."""
        return self.arguments.get(name, default)

    def explain(self, why: str) -> str:
        """A sentence that names the operation and where it stands."""
        return f"operation {self.name!r} in {self.location}: {why}"


def op_name(func: OpOverload) -> str:
    """The name of an operation without its overload and the mark of being in-place."""
    name: str = func._schema.name.partition("::")[2]
    return name if name.startswith("__") else name.rstrip("_")


def bind_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments under the names that the operation's schema gives them, defaults included."""
    arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
    arguments.update(
        {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
    )
    return {**arguments, **kwargs}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value, of a list of values, or of nothing."""
    if isinstance(value, Tensor):
        return [value]
    return (
        [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []
    )
