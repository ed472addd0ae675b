"""timm without torchvision: the few names of it that timm looks up, where torchvision is not
installed.
"""

import sys
import types
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

MODULES = (
    "torchvision",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.models",
    "torchvision.models.feature_extraction",
    "torchvision.datasets",
)
"""What timm imports; its models compute nothing with it."""

Interpolation = Enum(
    "InterpolationMode",
    {
        name: name.lower()
        for name in ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    },
)


class Borrowed(types.ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Make an empty class of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (object,), {})


def import_timm() -> Any:
    """Import timm, with torchvision where it is installed, elsewhere with its names alone, for this
    import alone.
    """
    if (
        "timm" in sys.modules
        or "torchvision" in sys.modules
        or find_spec("torchvision") is not None
    ):
        return import_module("timm")
    for name in MODULES:
        sys.modules[name] = Borrowed(name)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, sys.modules[name])
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        vars(sys.modules[name])["InterpolationMode"] = Interpolation
    try:
        return import_module("timm")
    finally:
        for name in MODULES:
            del sys.modules[name]
