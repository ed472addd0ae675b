"""One way to name a thing and its options in TOML, on the command line and in Python: `rolling(spread=true)`."""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedcover.errors import InvalidValue, unknown

_TOML_WORDS = {"true": True, "false": False}


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
    >>> parse("policy", "rolling(spread=yes)")
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: policy must look like name or name(option=value, ...); got 'rolling(spread=yes)'
    """
    name, bracket, inside = text.strip().partition("(")
    if not bracket:
        return Spec(name)
    try:
        if not inside.endswith(")"):
            raise ValueError
        call = ast.parse(f"f({inside}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return Spec(name.strip(), {str(word.arg): _literal(word.value) for word in call.keywords if word.arg})
    except (ValueError, SyntaxError):
        raise InvalidValue(f"{field} must look like name or name(option=value, ...); got {text!r}") from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _TOML_WORDS:
        return _TOML_WORDS[node.id]
    return ast.literal_eval(node)


def look_up(field: str, spec: Spec, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function that a specification names, with its options bound and checked against its signature.

    >>> def window(view, *, spread=False): ...
    >>> look_up("policy", Spec("window", {"spred": True}), {"window": window})
    Traceback (most recent call last):
    ...
    fedcover.errors.InvalidValue: policy window has no option 'spred'; its options are: spread
    """
    function = _imported(field, spec.name) if ":" in spec.name else table.get(spec.name)
    if function is None:
        raise unknown(field, spec.name, [*sorted(table), "package.module:function"])
    allowed = options_of(function)
    for option in spec.options:
        if option not in allowed:
            listed = ", ".join(allowed) or "none"
            raise InvalidValue(f"{field} {spec.name} has no option {option!r}; its options are: {listed}")
    missing = [name for name, p in allowed.items() if p.default is p.empty and name not in spec.options]
    if missing:
        raise InvalidValue(f"{field} {spec.name} needs the option {missing[0]!r}: {spec.name}({missing[0]}=...)")
    return partial(function, **spec.options)


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a table's function: those are what a user may set.

    >>> def labels(dataset, clients, *, limit): ...
    >>> list(options_of(labels))
    ['limit']
    """
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _imported(field: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidValue(f"{field} {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise InvalidValue(f"{field} {path!r} must be a function; it is a {type(function).__name__}")
    return function  # type: ignore[no-any-return]
