"""Checks on the results of user-defined rules, recipes and server optimisers.

Such code can do anything, so every result is compared with the model: names, shapes, types, devices
and finite values. A violation raises `InvalidValue` with one sentence that names the code.
fedcover's own rules, recipes and optimisers are tested instead, and run without these checks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fedcover import registry
from fedcover.errors import InvalidValue, TrainingDiverged
from fedcover.log import warn_once
from fedcover.registry import is_import_path
from fedcover.server.aggregation import RULES, SUMMABLE_RULES, UNWEIGHTED_RULES, WeightedUpdate
from fedcover.server.averaging import RateSchedule
from fedcover.server.optimizers import AggregatedTensor, OptimizerMemory, ServerStep
from fedcover.tensors import clone
from fedcover.types import Assignment, Batch, Carry, Forward, Outcome, Params, Recipe, Rule

# ── rules ───────────────────────────────────────────────────────────────────────────────────────


def build_rule(name: str) -> Rule:
    """Return the rule of a specification such as `trimmed_mean(share=0.2)`.

    A user-defined rule is checked. A rule that needs only sums is returned as a `SummableRule`.
    """
    spec = registry.parse("rule", name)
    if spec.name in SUMMABLE_RULES:
        make_rule = registry.look_up("rule", spec, SUMMABLE_RULES)
        summable: Rule = make_rule()
        return summable
    rule: Rule = registry.look_up("rule", spec, RULES)
    return _checked_rule(name, rule) if is_import_path(name) else rule


def warn_of_unused_weights(rule: str, weights: str) -> None:
    """Warn once if clients are to be weighted under a rule that counts them all the same."""
    name = registry.parse("rule", rule).name
    if name in UNWEIGHTED_RULES and weights != "uniform":
        warn_once(
            f"{weights!r} does not change the parameters under rule {name!r}, which counts every "
            "client the same; it weights norm statistics only",
            subject="weights",
        )


def _checked_rule(name: str, rule: Rule) -> Rule:
    """Check what a rule returns; give it copies, so that it cannot change the old model."""
    subject = f"rule {name!r}"

    @wraps(rule.func if isinstance(rule, partial) else rule)
    def checked(old: Params, updates: Iterable[WeightedUpdate]) -> Params:
        copies = clone(old)
        new = rule(copies, updates)
        check_tensors(subject, new, old)
        check_finite(subject, new)
        return new

    return checked


# ── server optimisers ───────────────────────────────────────────────────────────────────────────


def checked_server(name: str, step: ServerStep) -> ServerStep:
    """Return a server optimiser, checked if it is user-defined.

    Its step must return a tensor and a dict of tensors. The names of the dict must never change.
    """
    if not callable(step):
        raise InvalidValue(
            f"server {name!r} must make a function of a tensor and a memory; "
            f"got {describe_value(step)}"
        )
    return _CheckedStep(f"server {name!r}", step) if is_import_path(name) else step


class _CheckedStep:
    """A user-defined step of a server optimiser that is checked at every call."""

    def __init__(self, subject: str, step: ServerStep) -> None:
        self._subject = subject
        self._step = step
        self._memory_names: set[str] | None = None

    def __call__(
        self, tensor: AggregatedTensor, memory: OptimizerMemory
    ) -> tuple[Tensor, OptimizerMemory]:
        """Call the step with copies and check its result."""
        result = self._step(
            AggregatedTensor(tensor.old.clone(), tensor.new.clone(), tensor.where.clone()),
            clone(memory),
        )
        moved, new_memory = self._unpack(result)
        self._check_memory(memory, new_memory)
        tensors = {"tensor": moved, **new_memory}
        check_tensors(self._subject, tensors, dict.fromkeys(tensors, tensor.old))
        if not all(bool(values.isfinite().all()) for values in (moved, *new_memory.values())):
            raise TrainingDiverged(
                f"{self._subject} makes the model NaN or infinite; try a smaller step"
            )
        return moved, new_memory

    def _unpack(self, result: Any) -> tuple[Tensor, OptimizerMemory]:
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        raise InvalidValue(
            f"{self._subject} must give a tensor and a dict of tensors; "
            f"got {describe_value(result)}"
        )

    def _check_memory(self, memory: OptimizerMemory, new_memory: OptimizerMemory) -> None:
        expected = set(memory) or self._memory_names
        if expected is None:
            expected = set(new_memory)
        self._memory_names = expected
        if set(new_memory) != expected or "" in new_memory:
            raise InvalidValue(
                f"{self._subject} must remember {sorted(expected)} of every tensor; "
                f"got {sorted(map(str, new_memory))}"
            )


# ── averages ────────────────────────────────────────────────────────────────────────────────────


def checked_average(name: str, schedule: RateSchedule, rounds: int) -> RateSchedule:
    """Return the schedule of an averaged model, checked if it is user-defined.

    It must return a number in (0, 1], or None before the average begins.

    Raises:
        InvalidValue: If there is no average after the last round.
    """
    subject = f"average {name!r}"
    if not callable(schedule):
        raise InvalidValue(
            f"{subject} must make a function of a round and the number of rounds; "
            f"got {describe_value(schedule)}"
        )
    if not is_import_path(name):
        check_average_begins(name, schedule, rounds)
        return schedule

    def checked(round: int, rounds: int) -> float | None:
        try:
            rate = schedule(round, rounds)
        except TypeError as error:
            raise InvalidValue(
                f"{subject} must make a function of a round and the number of rounds; {error}"
            ) from error
        if rate is None:
            return None
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not 0 < rate <= 1:
            raise InvalidValue(
                f"{subject} must return a number in (0, 1], or None; got {rate!r:.80} "
                f"for round {round}"
            )
        return float(rate)

    check_average_begins(name, checked, rounds)
    return checked


def check_average_begins(name: str, schedule: RateSchedule, rounds: int) -> None:
    """Check that there is an average after the last round, if one is wanted."""
    if name != "none" and schedule(rounds, rounds) is None:
        raise InvalidValue(
            f"average must begin within the {rounds} rounds of the run; got {name!r}"
        )


# ── recipes ─────────────────────────────────────────────────────────────────────────────────────


def checked_recipe(name: str, recipe: Recipe) -> Recipe:
    """Return a recipe, checked if it is user-defined.

    Its loss must be one number, and its outcome must have the shapes of the client's part.
    """
    if not is_import_path(name):
        return recipe
    subject = f"recipe {name!r}"

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        value = recipe.loss(forward, params, batch, carry)
        _check_loss(subject, value)
        return value

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        outcome = recipe.finish(assignment, forward, params, carry)
        _check_outcome(f"{subject}: finish", outcome, params)
        return outcome

    return replace(recipe, loss=loss, finish=finish)


def _check_loss(subject: str, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
        raise InvalidValue(
            f"{subject}: loss must give one number, a floating tensor; got {describe_value(value)}"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise InvalidValue(
            f"{subject}: loss must depend on the parameters; this one has no gradient"
        )


def _check_outcome(subject: str, outcome: object, params: Params) -> None:
    if not isinstance(outcome, Outcome):
        raise InvalidValue(f"{subject} must give a fedcover Outcome; got {describe_value(outcome)}")
    check_tensors(subject, outcome.params, params)
    check_finite(subject, outcome.params)
    _check_bits(f"{subject}: bits", outcome.bits, params)
    for kind, tensors in _checked_mapping(f"{subject}: measured", outcome.measured).items():
        _check_measurement(f"{subject}: measured {kind!r}", tensors, params)
    for name, tensor in _checked_mapping(f"{subject}: private", outcome.private).items():
        if not isinstance(tensor, Tensor):
            raise InvalidValue(
                f"{subject}: private {name!r} must be a tensor; got {describe_value(tensor)}"
            )


def _check_bits(subject: str, value: object, params: Params) -> None:
    bits = _checked_mapping(subject, value)
    expected = {name: params[name].bool() for name in bits if name in params}
    check_tensors(subject, bits, expected)


def _check_measurement(subject: str, value: object, params: Params) -> None:
    tensors = _checked_mapping(subject, value)
    expected = {name: params[name] for name in tensors if name in params}
    check_tensors(subject, tensors, expected)
    check_finite(subject, tensors)


def _checked_mapping(subject: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidValue(f"{subject} must be given by name; got {describe_value(value)}")
    return value


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────


def check_tensors(subject: str, tensors: object, expected: Mapping[str, Tensor]) -> None:
    """Raise unless these are tensors of exactly the expected names, shapes, types and devices.

    Args:
        subject: whose tensors they are, for the error.
        tensors: the value to check.
        expected: tensors like those expected.

    Raises:
        InvalidValue: the value is not a mapping, or a tensor is missing, extra or different.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidValue(f"{subject} must give tensors by name; got {describe_value(tensors)}")
    for name in tensors:
        if name not in expected:
            raise InvalidValue(
                f"{subject} gives {name!r}, and there is no such tensor; "
                f"expected {_first_names(expected)}"
            )
    for name, like in expected.items():
        description = describe_value(like)
        if name not in tensors:
            raise InvalidValue(
                f"{subject} must give {name!r}, {description}; got nothing of that name"
            )
        tensor = tensors[name]
        if not isinstance(tensor, Tensor) or describe_value(tensor) != description:
            raise InvalidValue(
                f"{subject} must give {name!r} as {description}; got {describe_value(tensor)}"
            )


def check_finite(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise if a tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidValue(f"{subject} gives NaN or infinity in {name!r}")


def describe_value(value: object) -> str:
    """Describe a value for an error: a tensor by type and shape, anything else by its type.

    >>> describe_value(torch.zeros(2, 3)), describe_value(None), describe_value([1])
    ('float32 of shape (2, 3)', 'None', 'a list')
    """
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{dtype} of shape {tuple(value.shape)}{device}"
    return "None" if value is None else f"a {type(value).__name__}"


def _first_names(names: Iterable[str]) -> str:
    """List the first three names."""
    all_names = list(names)
    first_names = ", ".join(repr(name) for name in all_names[:3])
    return f"{first_names}, ..." if len(all_names) > 3 else first_names
