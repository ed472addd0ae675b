"""Parse names with options, such as `rolling(spread=true)`, and look up the named functions.

The same notation is used in TOML, on the command line and in Python.
"""

import ast
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from fedcover.errors import InvalidValue, unknown

MOVED_MODULES = {
    "fedcover.aggregation": ("fedcover.server.aggregation", "fedcover.server.optimizers"),
    "fedcover.datasets": ("fedcover.data.datasets",),
    "fedcover.models.dense": ("fedcover.models.mlp_cnn",),
    "fedcover.models.depth": ("fedcover.models.depth_resnet",),
    "fedcover.models.recurrent": ("fedcover.models.lstm",),
    "fedcover.models.residual": ("fedcover.models.resnet",),
    "fedcover.partition": ("fedcover.data.partition",),
    "fedcover.policies.regions": ("fedcover.policies.paper_regions",),
    "fedcover.policies.windows": ("fedcover.policies.width",),
    "fedcover.privacy": ("fedcover.server.privacy",),
    "fedcover.recipes": ("fedcover.training.recipes",),
    "fedcover.recipes.depthfl": ("fedcover.training.recipes.depthfl",),
    "fedcover.recipes.fedmask": ("fedcover.training.recipes.fedmask",),
    "fedcover.recipes.fiarse": ("fedcover.training.recipes.fiarse",),
    "fedcover.recipes.fjord": ("fedcover.training.recipes.fjord",),
    "fedcover.recipes.hermes": ("fedcover.training.recipes.hermes",),
    "fedcover.recipes.plain": ("fedcover.training.recipes.fedprox",),
    "fedcover.recipes.prunefl": ("fedcover.training.recipes.prunefl",),
    "fedcover.sources": ("fedcover.data.client_data",),
    "fedcover.training": ("fedcover.training.schedules",),
}
"""Modules of the first version, and where their functions are now: stored runs name them."""

POSITIONAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "dataset": (),
    "partition": ("dataset", "clients", "seed"),
    "model": ("shape", "classes", "norm"),
    "policy": ("view",),
    "recipe": (),
    "rule": ("old", "updates"),
    "server": (),
    "average": (),
    "privacy": (),
    "schedule": ("round", "rounds"),
}
"""The positional arguments of the function behind each field; all others are options.

A user's function must take as many, in this order; their names are free.
"""


@dataclass(frozen=True)
class Spec:
    """Name a function and its options.

    Attributes:
        name: A name from a table, or `package.module:function`.
        options: The keyword arguments of the call.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def parse(field: str, text: str) -> Spec:
    """Parse a specification.

    Args:
        field: The name of the field in error messages.
        text: The specification, such as `rolling(spread=true)`.

    Returns:
        The name and its options.

    Raises:
        InvalidValue: If the text is malformed.

    >>> parse("policy", "rolling")
    Spec(name='rolling', options={})
    >>> parse("model", "mlp(hidden=[200, 100])").options
    {'hidden': [200, 100]}
    >>> parse("policy", "rolling(spread)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: policy must look like name or name(option=value, ...); got ...
    """
    name, bracket, inside = text.strip().partition("(")
    if not bracket:
        return Spec(name)
    try:
        if not inside.endswith(")"):
            raise ValueError
        return Spec(name.strip(), _options(inside))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise InvalidValue(
            f"{field} must look like name or name(option=value, ...); got {text!r}"
        ) from None


def _options(inside: str) -> dict[str, Any]:
    # Python warns about odd literals; they are rejected below.
    with warnings.catch_warnings(action="ignore"):
        call = ast.parse(f"f({inside}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError
    options = {keyword.arg: _literal(keyword.value) for keyword in call.keywords if keyword.arg}
    if len(options) != len(call.keywords):  # a repeated option, or one unpacked with **
        raise ValueError
    return options


def _literal(node: ast.expr) -> Any:
    """Evaluate a number, word, string, boolean (TOML or Python), None, or a list or tuple."""
    match node:
        case ast.Name(id="true" | "false" as name):
            return name == "true"
        case ast.Name(id=name):  # quotes are optional: over=clients
            return name
        case ast.Constant(value=int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items):
            return [_literal(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_literal(item) for item in items)
    raise ValueError


def is_import_path(text: str) -> bool:
    """Return whether a specification names a user's function by its import path.

    >>> is_import_path("my.rules:mean(share=0.1)"), is_import_path("trimmed_mean(share=0.1)")
    (True, False)
    """
    return ":" in text.partition("(")[0]


def look_up(field: str, spec: Spec, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that a specification names, with its options bound, as `resolve` does."""
    function, options = resolve(field, spec, table)
    return partial(function, **options)


def resolve(
    field: str, spec: Spec, table: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Find the function that a specification names, and check its options.

    Args:
        field: The name of the field in error messages.
        spec: The name and its options.
        table: The built-in functions by name.

    Returns:
        The function, and its options in the types that it declares.

    Raises:
        InvalidValue: If the function is unknown or cannot be imported, or an option is wrong.

    >>> def window(view, *, spread=False): ...
    >>> resolve("policy", Spec("window", {"spred": True}), {"window": window})
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: policy window has no option 'spred'; its options are: spread
    """
    function = _import_function(field, spec.name) if ":" in spec.name else table.get(spec.name)
    if function is None:
        raise unknown(field, spec.name, [*sorted(table), "package.module:function"])
    allowed = options_of(function)
    for option in spec.options:
        if option not in allowed:
            names = ", ".join(allowed) or "none"
            raise InvalidValue(
                f"{field} {spec.name} has no option {option!r}; its options are: {names}"
            )
    for name in _required(allowed):
        if name not in spec.options:
            raise InvalidValue(
                f"{field} {spec.name} needs the option {name!r}: {spec.name}({name}=...)"
            )
    return function, {name: _validate_option(field, spec, allowed[name]) for name in spec.options}


def _required(options: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the options without a default."""
    return [name for name, option in options.items() if option.default is option.empty]


def _validate_option(field: str, spec: Spec, option: inspect.Parameter) -> Any:
    """Convert the value of an option to the type that the function declares, if any."""
    value = spec.options[option.name]
    if option.annotation is option.empty or isinstance(option.annotation, str):
        return value
    try:
        return TypeAdapter(option.annotation).validate_python(value)
    except PydanticUserError:  # a type that pydantic does not support
        return value
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise InvalidValue(
            f"{field} {spec.name}: {option.name}: {message[0].lower()}{message[1:]}; got {value!r}"
        ) from None


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function, which are its options.

    >>> def labels(dataset, clients, *, limit): ...
    >>> list(options_of(labels))
    ['limit']
    """
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _signature_rule(field: str) -> str:
    """Describe the signature that a field requires, for error messages."""
    arguments = POSITIONAL_ARGUMENTS[field]
    if not arguments:
        return "must take no positional argument, only options behind a *"
    return f"must take the positional arguments ({', '.join(arguments)}), and options behind a *"


def _module_with(module: str, name: str) -> types.ModuleType:
    """Import a module, or the one into which its function has moved since the first version."""
    for new_module in MOVED_MODULES.get(module, ()):
        imported = importlib.import_module(new_module)
        if hasattr(imported, name):
            return imported
    return importlib.import_module(module)


def _import_function(field: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise InvalidValue(f"{field} must look like package.module:function; got {path!r}")
    try:
        function = getattr(_module_with(module, name), name)
    except Exception as error:  # a user's module may fail in any way
        raise InvalidValue(
            f"{field} {path!r} cannot be imported: {error or type(error).__name__}"
        ) from error
    if not callable(function):
        raise InvalidValue(
            f"{field} {path!r} must be a function; it is a {type(function).__name__}"
        )
    _check_signature(field, path, function)
    return function  # type: ignore[no-any-return]


def _check_signature(field: str, path: str, function: Callable[..., Any]) -> None:
    """Raise `InvalidValue` unless a function can be called as its field requires."""
    try:
        signature = inspect.signature(function)
        if field in POSITIONAL_ARGUMENTS and not hasattr(function, "__wrapped__"):
            required_options = dict.fromkeys(_required(options_of(function)))
            signature.bind(*POSITIONAL_ARGUMENTS[field], **required_options)
    except ValueError:
        raise InvalidValue(
            f"{field} {path!r} must be a Python function; its parameters cannot be read"
        ) from None
    except TypeError as error:
        raise InvalidValue(f"{field} {path!r} {_signature_rule(field)}: {error}") from None
