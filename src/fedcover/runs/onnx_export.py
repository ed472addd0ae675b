"""A module as an ONNX file, for devices that run no Python."""

import copy
import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.errors import InvalidValue
from fedcover.host.disk import check_not_linked


def export_onnx(module: nn.Module, example: Tensor | tuple[Any, ...], path: str | Path) -> Path:
    """Write a module (a client's sub-model, or the whole) as one ONNX file, as it is evaluated.

    The length of the first axis of each input may differ from the example's wherever the module allows it. Needs the
    packages `onnx` and `onnxscript`.
    """
    check_not_linked(Path(path))
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise InvalidValue(f"writing ONNX needs {names}; in a checkout of fedcover: pip install '.[onnx]'")
    given = example if isinstance(example, tuple) else (example,)
    batch = tuple({0: torch.export.Dim.AUTO} if isinstance(each, Tensor) and each.ndim else None for each in given)
    talk = logging.getLogger("torch.onnx")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)  # it reports every extension that is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            quiet = copy.deepcopy(module).eval()
            program = torch.onnx.export(quiet, given, dynamo=True, verbose=False, dynamic_shapes=batch)
    finally:
        talk.setLevel(level)
    assert program is not None
    program.save(str(path), external_data=False)
    return Path(path)
