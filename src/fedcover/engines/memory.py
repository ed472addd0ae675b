"""What a module holds beside its parameters and buffers, so that it can be seen whether any of it has changed.

A step that was made fast once replays what the module did then. A module that counts, draws or is set otherwise in
Python would do something else the next time, which a replay does not know.
"""

import hashlib
import io
import pickle
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from fedcover.engines.steps import Unfit

_LEFT_OUT = ("_parameters", "_buffers", "_modules", "training")
_THEMSELVES = (type, FunctionType, BuiltinFunctionType, MethodDescriptorType, ModuleType, ReferenceType)
"""What is told apart by which object it is, not by what is in it."""


def fingerprint(module: nn.Module) -> bytes:
    """Equal for modules that hold the same beside the values of their parameters and buffers.

    >>> layer = nn.ReLU()
    >>> before = fingerprint(layer)
    >>> layer.history = {"steps": [1]}
    >>> fingerprint(layer) == before
    False
    """
    held = io.BytesIO()
    prints = _Prints(held, module)
    try:
        for path, part in module.named_modules():
            own = [(name, value) for name, value in vars(part).items() if name not in _LEFT_OUT]
            # torch gives every module some fifteen empty dicts for hooks
            prints.dump((path, type(part), [each for each in own if each[1] or not isinstance(each[1], dict)]))
    except Exception as error:  # whatever a user's object does when it is looked at
        why = (str(error).splitlines() or [""])[0]
        raise Unfit(f"the model holds something that may change unseen ({type(error).__name__}: {why:.100})") from error
    return hashlib.blake2b(held.getvalue()).digest()


class _Prints(pickle.Pickler):
    """Writes objects down; nothing is ever read back from it."""

    def __init__(self, file: io.BytesIO, module: nn.Module) -> None:
        super().__init__(file)
        self._known = {
            id(each): f"{kind} {name}"
            for kind in ("modules", "parameters", "buffers")
            for name, each in getattr(module, f"named_{kind}")()
        }

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
        return id(obj) if isinstance(obj, _THEMSELVES) else None
