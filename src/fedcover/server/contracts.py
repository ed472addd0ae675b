"""What rules, recipes and server optimisers of a user's own give back is checked, every time, in one sentence.

Their code may do anything; what comes back must fit the model. Those of the tables are tested instead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fedcover import registry
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.registry import is_import_path
from fedcover.server.aggregation import RULES, WeightedUpdate
from fedcover.server.optimizers import AggregatedTensor, OptimizerState, ServerStep
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe, Rule


def build_rule(name: str) -> Rule:
    """The rule of a specification; one of a user's own is given copies, so that the old model stays as it is."""
    rule: Rule = registry.look_up("rule", registry.parse("rule", name), RULES)
    if not is_import_path(name):
        return rule
    who = f"rule {name!r}"

    @wraps(rule.func if isinstance(rule, partial) else rule)
    def checked(old: Params, parts: Iterable[WeightedUpdate]) -> Params:
        new = rule({key: tensor.clone() for key, tensor in old.items()}, parts)
        check_tensors(who, new, old)
        check_finite(who, new)
        return new

    return checked


def checked_server(name: str, step: ServerStep) -> ServerStep:
    """The same server optimiser; one of a user's own must give a tensor and, by names that stay, what it remembers."""
    who = f"server {name!r}"
    if not callable(step):
        raise InvalidValue(
            f"{who} must make a function of a tensor and a memory; got {describe_value(step)}"
        )
    if not is_import_path(name):
        return step
    slots: list[set[str]] = []  # the names of the first answer

    def checked(tensor: AggregatedTensor, memory: OptimizerState) -> tuple[Tensor, OptimizerState]:
        kept = {slot: known.clone() for slot, known in memory.items()}
        answer = step(
            AggregatedTensor(tensor.old.clone(), tensor.new.clone(), tensor.where.clone()), kept
        )
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise InvalidValue(
                f"{who} must give a tensor and a dict of tensors; got {describe_value(answer)}"
            )
        moved, after = answer
        wanted = set(memory) or (slots or [set(after)])[0]
        slots[:] = [wanted]
        if set(after) != wanted or "" in after:
            raise InvalidValue(
                f"{who} must remember {sorted(wanted)} of every tensor; got {sorted(map(str, after))}"
            )
        check_tensors(
            who, {"tensor": moved, **after}, dict.fromkeys(("tensor", *after), tensor.old)
        )
        if not all(bool(values.isfinite().all()) for values in (moved, *after.values())):
            raise TrainingDiverged(f"{who} makes the model NaN or infinite; try a smaller step")
        return moved, after

    return checked


def checked_recipe(name: str, recipe: Recipe) -> Recipe:
    """The same recipe; of one of a user's own the loss must be one number and the end have the client's shapes."""
    if not is_import_path(name):
        return recipe
    who = f"recipe {name!r}"

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        value = recipe.loss(forward, params, batch, carry)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
            raise InvalidValue(
                f"{who}: loss must give one number, a floating tensor; got {describe_value(value)}"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise InvalidValue(
                f"{who}: loss must depend on the parameters; this one has no gradient"
            )
        return value

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        outcome = recipe.finish(assignment, forward, params, carry)
        _check_outcome(f"{who}: finish", outcome, assignment, params)
        return outcome

    return replace(recipe, loss=loss, finish=finish)


def _check_outcome(who: str, outcome: object, assignment: Assignment, params: Params) -> None:
    if not isinstance(outcome, Outcome):
        raise InvalidValue(f"{who} must give a fedcover Outcome; got {describe_value(outcome)}")
    check_tensors(who, outcome.params, params)
    check_finite(who, outcome.params)
    bits = _by_name(f"{who}: bits", outcome.bits)
    wanted = {name: params[name].bool() for name in bits if name in params}
    check_tensors(f"{who}: bits", bits, wanted)
    for kind, tensors in _by_name(f"{who}: measured", outcome.measured).items():
        known = _by_name(f"{who}: measured {kind!r}", tensors)
        check_tensors(
            f"{who}: measured {kind!r}",
            known,
            {name: params[name] for name in known if name in params},
        )
        check_finite(f"{who}: measured {kind!r}", known)
    for name, tensor in _by_name(f"{who}: private", outcome.private).items():
        if not isinstance(tensor, Tensor):
            raise InvalidValue(
                f"{who}: private {name!r} must be a tensor; got {describe_value(tensor)}"
            )


def _by_name(who: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{who} must be given by name; got {describe_value(given)}")
    return given


def check_tensors(who: str, given: object, wanted: Mapping[str, Tensor]) -> None:
    """Refuse anything but tensors of exactly these names, shapes, types and devices."""
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{who} must give tensors by name; got {describe_value(given)}")
    extra = [name for name in given if name not in wanted]
    if extra:
        raise InvalidValue(
            f"{who} gives {extra[0]!r}, and there is no such tensor; expected {_some(wanted)}"
        )
    for name, like in wanted.items():
        if name not in given:
            raise InvalidValue(
                f"{who} must give {name!r}, {describe_value(like)}; got nothing of that name"
            )
        tensor = given[name]
        if not isinstance(tensor, Tensor) or describe_value(tensor) != describe_value(like):
            raise InvalidValue(
                f"{who} must give {name!r} as {describe_value(like)}; got {describe_value(tensor)}"
            )


def check_finite(who: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity, as in a client's reply."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidValue(f"{who} gives NaN or infinity in {name!r}")


def describe_value(value: object) -> str:
    """A value in a sentence: a tensor by type and shape, anything else by its kind.

    >>> describe_value(torch.zeros(2, 3)), describe_value(None), describe_value([1])
    ('float32 of shape (2, 3)', 'None', 'a list')
    """
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}{place}"
    return "None" if value is None else f"a {type(value).__name__}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:3])) + (", ..." if len(listed) > 3 else "")
