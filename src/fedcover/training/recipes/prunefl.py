"""The client's side of PruneFL: it measures the squared gradient of every weight, pruned ones included.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model pruning enables efficient federated learning on edge devices
(TNNLS 2022). The server's side is the policy `prunefl`, which re-configures the common mask by what is measured here.
"""

import torch

from fedcover.errors import InvalidValue
from fedcover.policies.prunefl import RECONFIGURE_EVERY, last_answered_round
from fedcover.submodels.partial_params import local_params
from fedcover.submodels.reductions import without_masks
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import Assignment, Carry, Forward, Outcome, Params, Recipe


def prunefl(*, every: int = RECONFIGURE_EVERY) -> Recipe:
    """Plain SGD that also reports squared gradients, summed over the rounds since the last re-configuration.

    Of each round it takes the mean over the local steps. `every` must be that of the policy. `trained_in` says in which
    round (counted from 1) the prunable weights of the mask were last trained; it is 0 for those outside.
    """
    if every < 1:
        raise InvalidValue(f"recipe prunefl: every must be at least 1; got {every}")

    def start(assignment: Assignment, params: Params) -> Carry:
        measured, round = assignment.state.measured, assignment.state.round
        bits, prunable = assignment.reduction.gradient_mask(), assignment.task.model.prunable
        trained_in = {
            name: torch.full_like(params[name], round + 1) * bits.get(name, 1) for name in prunable
        }
        since = last_answered_round(
            {kind: local_params(tensors) for kind, tensors in measured.items()}
        )
        if since is not None and since // every == round // every:
            earlier = without_masks(assignment.reduction).extract(measured["squared_gradient"])
        else:
            earlier = {name: torch.zeros_like(p) for name, p in params.items()}
        return earlier, {name: torch.zeros_like(p) for name, p in params.items()}, trained_in

    def observe(carry: Carry, gradients: Params) -> Carry:
        earlier, sums, trained_in = carry
        return (
            earlier,
            {name: total + gradients[name] ** 2 for name, total in sums.items()},
            trained_in,
        )

    def finish(assignment: Assignment, forward: Forward, params: Params, carry: Carry) -> Outcome:
        earlier, sums, trained_in = carry
        total = {name: earlier[name] + squares / assignment.steps for name, squares in sums.items()}
        return Outcome(params, measured={"squared_gradient": total, "trained_in": trained_in})

    measures = {"squared_gradient": "all", "trained_in": "round"}
    return Recipe(cross_entropy, start, observe, finish, measures=measures)
