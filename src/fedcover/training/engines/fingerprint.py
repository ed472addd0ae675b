"""Fingerprint the Python state of a module: all that it holds except parameters and buffers.

A prepared step replays what the module did once. If a module counts, draws random numbers or is
reconfigured in Python, it would do something else the next time, and the replay would miss that.
Equal fingerprints before and after show that nothing has changed.
"""

import hashlib
import io
import pickle
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from fedcover.training.engines.unsupported import UnsupportedByEngine, summarize

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
"""Types whose objects are compared by identity, not by content."""


def fingerprint(module: nn.Module) -> bytes:
    """Return a hash of the Python state of a module and its submodules.

    >>> layer = nn.ReLU()
    >>> before = fingerprint(layer)
    >>> layer.history = {"steps": [1]}
    >>> fingerprint(layer) == before
    False

    Raises:
        UnsupportedByEngine: If an object in the module cannot be pickled.
    """
    stream = io.BytesIO()
    submodules = list(module.named_modules())
    pickler = _FingerprintPickler(stream, submodules)
    try:
        for path, submodule in submodules:
            pickler.dump((path, type(submodule), *pickler.python_state(submodule)))
    except Exception as error:  # pickling runs a user's code, which may raise anything
        raise UnsupportedByEngine(
            f"the model holds something that may change unseen ({summarize(error)})"
        ) from error
    return hashlib.blake2b(stream.getvalue()).digest()


class _FingerprintPickler(pickle.Pickler):
    """A pickler whose output is only hashed, never loaded.

    Submodules, parameters and buffers are written as their paths.
    """

    def __init__(self, file: io.BytesIO, submodules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__(file)
        self._paths = {id(submodule): path for path, submodule in submodules}
        for path, submodule in submodules:
            for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
                self._paths.setdefault(id(tensor), f"{path}.{name}")
        self._paths.pop(id(None), None)  # a parameter or buffer may be registered as None

    def python_state(self, submodule: nn.Module) -> tuple[str, dict[str, object]]:
        """Return the simple attributes of a module as one text, and the others by name.

        A text is cheap to pickle, and this is done in every round.
        """
        attributes = vars(submodule)
        lines = []
        for kind in _MODULE_DICTS:
            for name, registered in attributes[kind].items():
                lines.append(f"{kind} {name} {self._paths.get(id(registered))}")
        others = {}
        for name, value in attributes.items():
            if name == "training" or name in _MODULE_DICTS:
                continue
            if isinstance(value, dict) and not value:
                continue  # torch gives every module some fifteen empty dicts for hooks
            if _is_simple(value):
                lines.append(f"{name} {type(value).__name__} {value!r}")
            else:
                others[name] = value
        return "\n".join(lines), others

    def persistent_id(self, obj: object) -> object:
        if id(obj) in self._paths:
            return self._paths[id(obj)]
        if isinstance(obj, Tensor):
            return _describe_tensor(obj)
        if isinstance(obj, torch.Generator):
            return obj.get_state().numpy().tobytes()
        return id(obj) if isinstance(obj, _IDENTITY_TYPES) else None


def _is_simple(value: object) -> bool:
    """Return whether `repr` shows all that a value holds."""
    if isinstance(value, _PRIMITIVES):
        return True
    return type(value) is tuple and all(type(entry) is int for entry in value)


def _describe_tensor(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape and, unless it is a meta tensor, a hash of its values."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return kind
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.blake2b(values).hexdigest()}"
