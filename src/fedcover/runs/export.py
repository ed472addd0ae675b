"""Export a trained model or a part of it: as safetensors, to be loaded again, or as ONNX."""

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
from fedcover.runs.components import as_model, build_model, build_recipe, uses_submodels
from fedcover.runs.experiment import Experiment
from fedcover.runs.run_result import Run
from fedcover.runs.session import shapes_by_name
from fedcover.submodels.build import load_tensors, meta_submodel
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.reductions import Slices
from fedcover.types import Model, Reduction

_MODEL_FIELDS = ("model", "norm", "recipe", "absent_labels", "label_rows", "seed")
"""The fields of an experiment that say how its module is built; the others are not read."""

MIN_UNIT_LIMIT = 2**20
"""Any model may have this many units, even if a file has little of it left."""

_Size = Annotated[int, Field(ge=1, le=2**40)]


class _Header(BaseModel):
    """The description in an exported file."""

    experiment: dict[str, Any]
    reduction: str = Field(pattern=r"^([0-9a-f]{2})*$")
    shape: list[_Size] = Field(max_length=8)
    classes: _Size
    masked: list[str] | None = None
    integers: bool = False


# ── writing ─────────────────────────────────────────────────────────────────────────────────────


def export(
    run: Run, capacity: float, path: Path, format: str = "safetensors", *, averaged: bool = False
) -> dict[str, Any]:
    """Write the trained model, or the part of it that a device of some capacity holds.

    Args:
        run: The finished run.
        capacity: The device's capacity; 1 is the whole model.
        path: The file to write.
        format: One of `FORMATS`.
        averaged: Whether to write the averaged model.

    Returns:
        What was written, as the command prints it.
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    reduction = run.part(capacity, averaged=averaged)
    module = run.submodel(capacity, averaged=averaged)
    FORMATS[format](run, reduction, module, path)
    return {
        "path": str(path),
        "format": format,
        "capacity": capacity,
        "parameters": sum(reduction.sizes(run.state.params).values()),
        "stored": sum(p.numel() for p in module.parameters()),
        "shape": list(run.setup.task.source.test.x.shape[1:]),
    }


def _write_safetensors(run: Run, reduction: Reduction, module: nn.Module, path: Path) -> None:
    source = run.setup.task.source
    header = {
        "experiment": run.experiment.model_dump(mode="json"),
        "reduction": encode(reduction).hex(),
        "masked": [] if isinstance(reduction, Slices) else sorted(reduction.gradient_mask()),
        "shape": list(source.test.x.shape[1:]),
        "classes": source.classes,
        "integers": not source.test.x.is_floating_point(),
        "rounds": run.state.round,
    }
    tensors = {name: t.contiguous().cpu() for name, t in params_and_buffers(module).items()}
    content = safetensors.torch.save(tensors, metadata={"fedcover": json.dumps(header)})
    write_atomically(path, content)


def _write_onnx(run: Run, reduction: Reduction, module: nn.Module, path: Path) -> None:
    export_onnx(module.cpu(), run.setup.task.source.test.x[:2].cpu(), path)


FORMATS: dict[str, Callable[[Run, Reduction, nn.Module, Path], None]] = {
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
}


def export_onnx(module: nn.Module, example: Tensor | tuple[Any, ...], path: str | Path) -> Path:
    """Write a module in evaluation mode as one ONNX file.

    The first axis of each input may have another length than in the example, if the module
    allows it. Requires the packages `onnx` and `onnxscript`.
    """
    check_not_linked(Path(path))
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise InvalidValue(
            f"writing ONNX needs {names}; in a checkout of fedcover: pip install '.[onnx]'"
        )
    inputs = example if isinstance(example, tuple) else (example,)
    dynamic_shapes = tuple(
        {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.ndim else None
        for value in inputs
    )
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # it reports every extension that is not installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            program = torch.onnx.export(
                copy.deepcopy(module).eval(),
                inputs,
                dynamo=True,
                verbose=False,
                dynamic_shapes=dynamic_shapes,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    program.save(str(path), external_data=False)
    return Path(path)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def load_part(path: str | Path, *, model: Model | nn.Module | None = None) -> nn.Module:
    """Load an exported safetensors file; neither the run folder nor its data is needed.

    Args:
        path: The file that `fedcover export` has written.
        model: The whole model, if the run's model was made in Python or by a user's function.
            A file never decides which function is called.

    Returns:
        The exported module in evaluation mode.

    Raises:
        RunError: If the file is damaged, needs `model`, or does not hold a part of the model.
    """
    header, tensors = _read_file(path)
    experiment = _experiment_of(path, header, model_given=model is not None)
    whole = _build_whole(path, header, experiment, model)
    try:
        part = _build_part(header, whole, tensors)
        fits = _fits(part, tensors)
    except (InvalidValue, KeyError):  # a reduction of another model
        fits = False
    if not fits:
        expected = f"model {experiment.model!r} (if it was made in Python, give it again)"
        if model is not None:
            expected = "the given model"
        raise RunError(f"{path} does not hold a part of {expected}")
    return load_tensors(part, tensors).eval()


def _read_file(path: str | Path) -> tuple[_Header, dict[str, Tensor]]:
    """Read the description and the tensors of an exported file."""
    try:
        check_regular(Path(path))
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("fedcover", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    try:
        return _Header.model_validate(header), tensors
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "header"
        raise RunError(
            f"{path} is not a model exported by fedcover: its header's {field}: {first['msg']}"
        ) from error


def _experiment_of(path: str | Path, header: _Header, *, model_given: bool) -> Experiment:
    """Return as much of the experiment as its module needs, without untrusted functions.

    A given model replaces both the run's model and what a user's recipe made of it.
    """
    fields = {name: header.experiment[name] for name in _MODEL_FIELDS if name in header.experiment}
    untrusted = {
        field: text
        for field, text in trust.custom_functions(fields).items()
        if not trust.all_trusted({field: text})
    }
    if untrusted and not model_given:
        field, text = next(iter(untrusted.items()))
        raise RunError(
            f"{path} would have {text!r} called as its {field}, which a file may not say: build "
            f"that module yourself and give it, as in fedcover.load_part({str(path)!r}, model=...)"
        )
    trusted = {name: value for name, value in fields.items() if name not in untrusted}
    # all that matters of the policy is whether it cuts the model
    policy = "full" if header.experiment.get("policy") == "full" else "prefix"
    try:
        return Experiment(**trusted, policy=policy)
    except InvalidValue as error:
        raise RunError(f"{path} is not a model exported by fedcover: {error}") from error


def _build_whole(
    path: str | Path, header: _Header, experiment: Experiment, model: Model | nn.Module | None
) -> Model:
    """Build the model that the file holds a part of."""
    dtype = torch.int64 if header.integers else torch.float32
    shape, classes = tuple(header.shape), header.classes
    if model is not None:
        adapted = as_model(model, shape, classes, dtype, needs_groups=uses_submodels(experiment))
        return build_recipe(experiment).model(adapted)
    try:
        return _build_on_meta(experiment, shape, classes, dtype)
    except InvalidValue as error:
        raise RunError(f"{path} is not a model exported by fedcover: {error}") from error


def _build_on_meta(
    experiment: Experiment, shape: tuple[int, ...], classes: int, dtype: torch.dtype
) -> Model:
    """Build the whole model without values: a tiny file may name one that fills the memory."""
    builder = partial(build_model, experiment, shape, classes, dtype)
    try:
        return build_on_meta(builder)
    except NotBuildableOnMeta:  # it keeps random numbers, so it is small
        return builder()


def _build_part(header: _Header, whole: Model, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the part of the model that the file describes, without values."""
    params = dict(whole.module.named_parameters())
    masked_names = whole.prunable if header.masked is None else header.masked
    masked = {name: params[name] for name in masked_names}
    _check_group_sizes(whole, tensors)
    reduction = decode(bytes.fromhex(header.reduction), whole.groups, masked)
    return meta_submodel(whole.module, reduction)


def _check_group_sizes(whole: Model, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the model has more units than a part with so few numbers can come from."""
    numbers = sum(tensor.numel() for tensor in tensors.values())
    units = sum(group.size for group in whole.groups)
    if units > max(MIN_UNIT_LIMIT, numbers):
        raise InvalidValue(f"a model of {units} units has no part of {numbers} numbers")


def _fits(part: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors have the names, shapes and types of a part."""
    expected = params_and_buffers(part)
    if shapes_by_name(expected) != shapes_by_name(dict(tensors)):
        return False
    return all(tensors[name].dtype == tensor.dtype for name, tensor in expected.items())
