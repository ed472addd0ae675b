"""Taking a model away: a safetensors file that says how to build the module again, or an ONNX file."""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedcover.errors import InvalidValue, RunError, unknown
from fedcover.host.disk import check_not_linked, check_regular, write_atomically
from fedcover.models import params_and_buffers
from fedcover.models.meta_device import NotBuildableOnMeta, build_on_meta
from fedcover.runs import trust
from fedcover.runs.api import Run
from fedcover.runs.components import as_model, build_model, build_recipe, cuts
from fedcover.runs.experiment import Experiment
from fedcover.runs.session import shapes_by_name
from fedcover.submodels.build import load_tensors, meta_submodel
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.reductions import Slices
from fedcover.types import Model, Reduction

_OF_THE_MODEL = ("model", "norm", "recipe", "absent_labels", "label_rows", "seed")
"""Fields of an experiment that say how its module is built; nothing is read of the others."""
LEAST_UNITS = 2**20
"""So many units any model may have, however little of it is left in a file."""
_Size = Annotated[int, Field(ge=1, le=2**40)]


class _Header(BaseModel):
    """What an exported file says of itself."""

    experiment: dict[str, Any]
    reduction: str = Field(pattern=r"^([0-9a-f]{2})*$")
    shape: list[_Size] = Field(max_length=8)
    classes: _Size
    masked: list[str] | None = None
    integers: bool = False


def export(run: Run, capacity: float, path: Path, format: str = "safetensors") -> dict[str, Any]:
    """Write the trained model, or the part of it that a device of some capacity holds."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    part, module = run.part(capacity), run.submodel(capacity)
    FORMATS[format](run, part, module, path)
    return {
        "path": str(path),
        "format": format,
        "capacity": capacity,
        "parameters": sum(part.sizes(run.state.params).values()),
        "stored": sum(p.numel() for p in module.parameters()),
        "shape": list(run.setup.task.source.test.x.shape[1:]),
    }


def _as_safetensors(run: Run, part: Reduction, module: nn.Module, path: Path) -> None:
    source = run.setup.task.source
    about = {
        "experiment": run.experiment.model_dump(mode="json"),
        "reduction": encode(part).hex(),
        "masked": [] if isinstance(part, Slices) else sorted(part.gradient_mask()),
        "shape": list(source.test.x.shape[1:]),
        "classes": source.classes,
        "integers": not source.test.x.is_floating_point(),
        "rounds": run.state.round,
    }
    values = {name: t.contiguous().cpu() for name, t in params_and_buffers(module).items()}
    write_atomically(path, safetensors.torch.save(values, metadata={"fedcover": json.dumps(about)}))


def _as_onnx(run: Run, part: Reduction, module: nn.Module, path: Path) -> None:
    export_onnx(module.cpu(), run.setup.task.source.test.x[:2].cpu(), path)


FORMATS: dict[str, Callable[[Run, Reduction, nn.Module, Path], None]] = {
    "safetensors": _as_safetensors,
    "onnx": _as_onnx,
}


def load_part(path: str | Path, *, model: Model | nn.Module | None = None) -> nn.Module:
    """The exported module, ready to use; needs neither the run folder nor its data.

    `model` is needed only if the run's model was made in Python, or by a function of a user's own: a file never says
    what is called.
    """
    header, values = _read(path)
    experiment = _experiment(path, header, given=model is not None)
    dtype = torch.int64 if header.integers else torch.float32
    shape, classes = tuple(header.shape), header.classes
    if model is None:
        try:
            whole = _build_on_meta(experiment, shape, classes, dtype)
        except InvalidValue as error:
            raise RunError(f"{path} is no model exported by fedcover: {error}") from error
    else:
        whole = build_recipe(experiment).model(
            as_model(model, shape, classes, dtype, cut=cuts(experiment))
        )
    params = dict(whole.module.named_parameters())
    try:
        masked = {
            name: params[name]
            for name in (whole.prunable if header.masked is None else header.masked)
        }
        _check_group_sizes(whole, values)
        part = meta_submodel(
            whole.module, decode(bytes.fromhex(header.reduction), whole.groups, masked)
        )
        wanted = params_and_buffers(part)
        fitting = shapes_by_name(wanted) == shapes_by_name(values)
        fitting = fitting and all(
            values[name].dtype == tensor.dtype for name, tensor in wanted.items()
        )
    except (InvalidValue, KeyError):  # a reduction of another model
        fitting = False
    if not fitting:
        other = (
            "the given model"
            if model
            else f"model {experiment.model!r} (if it was made in Python, give it again)"
        )
        raise RunError(f"{path} does not hold a part of {other}")
    return load_tensors(part, values).eval()


def _build_on_meta(
    experiment: Experiment, shape: tuple[int, ...], classes: int, dtype: torch.dtype
) -> Model:
    """The model that the whole run had; a file of a few bytes may name one that fills the memory."""
    build = partial(build_model, experiment, shape, classes, dtype)
    try:
        return build_on_meta(build)
    except NotBuildableOnMeta:  # it keeps numbers that are drawn: a small model
        return build()


def _check_group_sizes(whole: Model, values: Mapping[str, Tensor]) -> None:
    """Complain about groups of more units than a part of so few numbers can have been cut from."""
    numbers = sum(tensor.numel() for tensor in values.values())
    units = sum(group.size for group in whole.groups)
    if units > max(LEAST_UNITS, numbers):
        raise InvalidValue(f"a model of {units} units has no part of {numbers} numbers")


def _read(path: str | Path) -> tuple[_Header, dict[str, Tensor]]:
    """What an exported file says of itself, and its tensors."""
    try:
        check_regular(Path(path))
        with safe_open(path, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get("fedcover", "{}"))
            values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    try:
        return _Header.model_validate(about), values
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "header"
        raise RunError(
            f"{path} is no model exported by fedcover: its header's {where}: {first['msg']}"
        ) from error


def _experiment(path: str | Path, header: _Header, *, given: bool) -> Experiment:
    """As much of the run's experiment as its module needs; functions that it names are not called.

    A module that is given takes the place of both the model and what a recipe of the user's own made of it.
    """
    fields = {name: header.experiment[name] for name in _OF_THE_MODEL if name in header.experiment}
    own = {
        name: text
        for name, text in trust.custom_functions(fields).items()
        if not trust.all_trusted({name: text})
    }
    if own and not given:
        field, text = next(iter(own.items()))
        raise RunError(
            f"{path} would have {text!r} called as its {field}, which a file may not say: build that module yourself "
            f"and give it, as in fedcover.load_part({str(path)!r}, model=...)"
        )
    kept = {name: value for name, value in fields.items() if name not in own}
    policy = (
        "full" if header.experiment.get("policy") == "full" else "prefix"
    )  # only whether anything was cut
    try:
        return Experiment(**kept, policy=policy)
    except InvalidValue as error:
        raise RunError(f"{path} is no model exported by fedcover: {error}") from error


def export_onnx(module: nn.Module, example: Tensor | tuple[Any, ...], path: str | Path) -> Path:
    """Write a module (a client's sub-model, or the whole) as one ONNX file, as it is evaluated.

    The length of the first axis of each input may differ from the example's wherever the module allows it. Needs the
    packages `onnx` and `onnxscript`.
    """
    check_not_linked(Path(path))
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise InvalidValue(
            f"writing ONNX needs {names}; in a checkout of fedcover: pip install '.[onnx]'"
        )
    given = example if isinstance(example, tuple) else (example,)
    batch = tuple(
        {0: torch.export.Dim.AUTO} if isinstance(each, Tensor) and each.ndim else None
        for each in given
    )
    talk = logging.getLogger("torch.onnx")
    level = talk.level
    try:
        talk.setLevel(logging.ERROR)  # it reports every extension that is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            quiet = copy.deepcopy(module).eval()
            program = torch.onnx.export(
                quiet, given, dynamo=True, verbose=False, dynamic_shapes=batch
            )
    finally:
        talk.setLevel(level)
    assert program is not None
    program.save(str(path), external_data=False)
    return Path(path)
