"""One way to name a thing and its options in TOML, on the command line and in Python: `rolling(spread=true)`."""

import ast
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from fedcover.errors import InvalidValue, unknown

POSITIONAL_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "dataset": (),
    "partition": ("dataset", "clients", "seed"),
    "model": ("shape", "classes", "norm"),
    "policy": ("view",),
    "recipe": (),
    "rule": ("old", "parts"),
    "server": (),
    "privacy": (),
    "schedule": ("round", "rounds"),
}
"""The positional arguments of the function behind each field (the order counts, not the names); others are options."""


@dataclass(frozen=True)
class Spec:
    """A name from a table (or `package.module:function`) and the options it is called with."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def parse(field: str, text: str) -> Spec:
    """Read a specification; `field` is named in the error if it makes no sense.

    >>> parse("policy", "rolling")
    Spec(name='rolling', options={})
    >>> parse("model", "mlp(hidden=[200, 100])").options
    {'hidden': [200, 100]}
    >>> parse("policy", "rolling(spread)")
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: policy must look like name or name(option=value, ...); got 'rolling(spread)'
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
    with warnings.catch_warnings(action="ignore"):  # of odd literals, which are refused below
        call = ast.parse(f"f({inside}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError
    options = {word.arg: _literal(word.value) for word in call.keywords if word.arg}
    if len(options) != len(call.keywords):  # given twice, or unpacked with **
        raise ValueError
    return options


def _literal(node: ast.expr) -> Any:
    """A number, word, string, boolean (as in TOML or Python), None, or a list or tuple of these."""
    match node:
        case ast.Name(id="true" | "false" as word):
            return word == "true"
        case ast.Name(id=word):  # over=clients may be written without quotes
            return word
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
    """Whether a specification names a function of some module, a user's own, rather than one of a table.

    >>> is_import_path("my.rules:mean(share=0.1)"), is_import_path("trimmed_mean(share=0.1)")
    (True, False)
    """
    return ":" in text.partition("(")[0]


def look_up(field: str, spec: Spec, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that a specification names, with its options bound and checked against its signature.

    >>> def window(view, *, spread=False): ...
    >>> look_up("policy", Spec("window", {"spred": True}), {"window": window})
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
            listed = ", ".join(allowed) or "none"
            raise InvalidValue(
                f"{field} {spec.name} has no option {option!r}; its options are: {listed}"
            )
    missing = [
        name for name, p in allowed.items() if p.default is p.empty and name not in spec.options
    ]
    if missing:
        raise InvalidValue(
            f"{field} {spec.name} needs the option {missing[0]!r}: {spec.name}({missing[0]}=...)"
        )
    return partial(
        function, **{name: _validate_option(field, spec, allowed[name]) for name in spec.options}
    )


def _validate_option(field: str, spec: Spec, option: inspect.Parameter) -> Any:
    """The value given for an option, as the type that the function declares for it, if it declares one."""
    value = spec.options[option.name]
    if option.annotation is option.empty or isinstance(option.annotation, str):
        return value
    try:
        return TypeAdapter(option.annotation).validate_python(value)
    except PydanticUserError:  # a type of which pydantic knows nothing
        return value
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise InvalidValue(
            f"{field} {spec.name}: {option.name}: {message[0].lower()}{message[1:]}; got {value!r}"
        ) from None


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a table's function: those are what a user may set.

    >>> def labels(dataset, clients, *, limit): ...
    >>> list(options_of(labels))
    ['limit']
    """
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _signature_rule(field: str) -> str:
    arguments = POSITIONAL_ARGUMENTS[field]
    if not arguments:
        return "must take no positional argument, only options behind a *"
    return f"must take the positional arguments ({', '.join(arguments)}), and options behind a *"


def _import_function(field: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), name]):
        raise InvalidValue(f"{field} must look like package.module:function; got {path!r}")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may fail in any way
        raise InvalidValue(
            f"{field} {path!r} cannot be imported: {error or type(error).__name__}"
        ) from error
    if not callable(function):
        raise InvalidValue(
            f"{field} {path!r} must be a function; it is a {type(function).__name__}"
        )
    try:
        inspect.signature(function)
        if field in POSITIONAL_ARGUMENTS and not hasattr(function, "__wrapped__"):
            needed = {
                name: None for name, p in options_of(function).items() if p.default is p.empty
            }
            inspect.signature(function).bind(*POSITIONAL_ARGUMENTS[field], **needed)
    except ValueError:
        raise InvalidValue(
            f"{field} {path!r} must be a Python function; its parameters cannot be read"
        ) from None
    except TypeError as error:
        raise InvalidValue(f"{field} {path!r} {_signature_rule(field)}: {error}") from None
    return function  # type: ignore[no-any-return]
