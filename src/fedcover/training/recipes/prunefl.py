"""The client's side of PruneFL: measure the squared gradient of every weight, even pruned ones.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning on
edge devices (TNNLS 2022). The server's side is the policy `prunefl`. It reconfigures the common
mask by what is measured here.
"""

import torch

from fedcover.errors import InvalidValue
from fedcover.policies.prunefl import RECONFIGURE_EVERY, last_answered_round
from fedcover.submodels.partial_params import local_params
from fedcover.submodels.reductions import without_masks
from fedcover.tensors import zeros_like
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Assignment, Carry, Forward, Outcome, Params, Recipe


def prunefl(*, every: int = RECONFIGURE_EVERY) -> Recipe:
    """Train by plain SGD and report squared gradients, summed since the last reconfiguration.

    For each round, the mean over the local steps is added. `trained_in` reports the round (from 1)
    in which the prunable weights in the mask were last trained; it is 0 for those outside.

    Args:
        every: The number of rounds between reconfigurations; the same as that of the policy.
    """
    if every < 1:
        raise InvalidValue(f"recipe prunefl: every must be at least 1; got {every}")

    def start(assignment: Assignment, params: Params) -> Carry:
        earlier = _earlier_squares(assignment, params, every)
        return earlier, zeros_like(params), _trained_in(assignment, params)

    def observe(carry: Carry, gradients: Params) -> Carry:
        earlier, sums, trained_in = carry
        new_sums = {name: total + gradients[name] ** 2 for name, total in sums.items()}
        return earlier, new_sums, trained_in

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        earlier, sums, trained_in = carry
        totals = {name: earlier[name] + total / assignment.steps for name, total in sums.items()}
        return Outcome(params, measured={"squared_gradient": totals, "trained_in": trained_in})

    measures = {"squared_gradient": "all", "trained_in": "round"}
    return Recipe(cross_entropy, start, observe, finish, measures=measures)


def _trained_in(assignment: Assignment, params: Params) -> Params:
    """Return this round's number for prunable weights in the mask, and 0 for those outside."""
    bits = assignment.reduction.gradient_mask()
    number = assignment.state.round + 1
    rounds = {}
    for name in assignment.task.model.prunable:
        rounds[name] = torch.full_like(params[name], number) * bits.get(name, 1)
    return rounds


def _earlier_squares(assignment: Assignment, params: Params, every: int) -> Params:
    """Return what was measured since the last reconfiguration, or zeros."""
    measured = assignment.state.measured
    last_round = last_answered_round(
        {kind: local_params(tensors) for kind, tensors in measured.items()}
    )
    if last_round is None or last_round // every != assignment.state.round // every:
        return zeros_like(params)
    return without_masks(assignment.reduction).extract(measured["squared_gradient"])
