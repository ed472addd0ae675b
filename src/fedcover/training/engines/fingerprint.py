"""What a module holds beside its parameters and buffers, so that it can be seen whether any of it has changed.

A step that was made fast once replays what the module did then. A module that counts, draws or is set otherwise in
Python would do something else the next time, which a replay does not know.
"""

import hashlib
import io
import pickle
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from fedcover.training.engines.sgd_step import UnsupportedByEngine

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_PRIMITIVES = (int, float, str, bool, type(None))
_IDENTITY_TYPES = (
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodDescriptorType,
    ModuleType,
    ReferenceType,
)
"""What is told apart by which object it is, not by what is in it."""


def fingerprint(module: nn.Module) -> bytes:
    """Equal for modules that hold the same beside the values of their parameters and buffers.

    >>> layer = nn.ReLU()
    >>> before = fingerprint(layer)
    >>> layer.history = {"steps": [1]}
    >>> fingerprint(layer) == before
    False
    """
    held, parts = io.BytesIO(), list(module.named_modules())
    prints = _FingerprintPickler(held, parts)
    try:
        for path, part in parts:
            prints.dump((path, type(part), *prints.state_of(part)))
    except Exception as error:  # whatever a user's object does when it is looked at
        why = (str(error).splitlines() or [""])[0]
        raise UnsupportedByEngine(
            f"the model holds something that may change unseen ({type(error).__name__}: {why:.100})"
        ) from error
    return hashlib.blake2b(held.getvalue()).digest()


class _FingerprintPickler(pickle.Pickler):
    """Writes objects down; nothing is ever read back from it."""

    def __init__(self, file: io.BytesIO, parts: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__(file)
        self._known = {id(part): path for path, part in parts}
        for path, part in parts:
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                self._known.setdefault(id(tensor), f"{path}.{name}")
        self._known.pop(id(None), None)  # what may be registered, too

    def state_of(self, part: nn.Module) -> tuple[str, dict[str, object]]:
        """What a part holds: in one text what is simple, the rest by name; it is asked for in every round."""
        held = vars(part)
        simple = [f"{kind} {name} {self._known.get(id(each))}" for kind in _MODULE_DICTS
                  for name, each in held[kind].items()]  # fmt: skip
        others = {}
        for name, value in held.items():
            if (
                name == "training"
                or name in _MODULE_DICTS
                or (isinstance(value, dict) and not value)
            ):
                continue  # torch gives every module some fifteen empty dicts for hooks
            if isinstance(value, _PRIMITIVES) or (
                type(value) is tuple and all(type(each) is int for each in value)
            ):
                simple.append(f"{name} {type(value).__name__} {value!r}")
            else:
                others[name] = value
        return "\n".join(simple), others

    def persistent_id(self, obj: object) -> object:
        if id(obj) in self._known:
            return self._known[id(obj)]
        if isinstance(obj, Tensor) and obj.is_meta:
            return f"{obj.dtype} {tuple(obj.shape)}"
        if isinstance(obj, Tensor):
            values = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return f"{obj.dtype} {tuple(obj.shape)} {hashlib.blake2b(values).hexdigest()}"
        if isinstance(obj, torch.Generator):
            return obj.get_state().numpy().tobytes()
        return id(obj) if isinstance(obj, _IDENTITY_TYPES) else None
