"""The systems, slowly: each from its definition, with dense tensors, plain loops and nothing of the
recipe.

They share with the library the model, the policy's masks, cutting a module to size, and the
addresses of the random draws. Every twin takes (setup, state, client, reduction) and gives the
client's parameters in the full shapes and a mask of the entries that count; `slow_round` averages
them entry by entry.
"""

import copy
import math
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor
from torch.func import functional_call

from fedcover.fleet import drops_out
from fedcover.models.norms import use_batch_statistics
from fedcover.rng import generator
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round_setup import Setup
from fedcover.submodels.build import submodel
from fedcover.submodels.reductions import Slices
from fedcover.types import Client, Reduction, State
from tests.helpers.reference import dense_module

Tensors = dict[str, Tensor]


@dataclass
class Slow:
    """What a twin's client has made: parameters in the full shapes, the entries that count, and
    anything else.
    """

    params: Tensors
    counts: Tensors
    more: Tensors = field(default_factory=dict)


def working(setup: Setup, state: State) -> list[tuple[Client, Reduction]]:
    """The clients of the coming round that train, with their parts."""
    cohort = cohort_of(setup, state.round)
    planned = zip(cohort, setup.policy(view_of(setup, state, cohort)), strict=True)
    return [
        (client, part)
        for client, part in sorted(planned, key=lambda pair: pair[0].id)
        if part is not None
        and not drops_out(client.id, setup.experiment.drop_out, setup.task.seed, state.round)
    ]


def slow_round(setup: Setup, state: State, twin) -> tuple[Tensors, list[tuple[Client, Slow]]]:
    """The global parameters after a round, by loops, and what every client made."""
    updates = [(client, twin(setup, state, client, part)) for client, part in working(setup, state)]
    weigh = {"uniform": lambda client: 1.0, "samples": lambda client: float(client.samples)}[
        setup.experiment.weights
    ]
    parts = [(slow.params, slow.counts, weigh(client)) for client, slow in updates]
    return combined(state.params, parts, weighted_mean), updates


def combined(old: Tensors, parts: list[tuple[Tensors, Tensors, float]], rule) -> Tensors:
    """Every entry by itself: `rule(old value, [(value, weight), ...] of those who count, weight of
    all)`.
    """
    everybody = sum(weight for _, _, weight in parts)
    new = {}
    for name, tensor in old.items():
        columns = [(v[name].flatten().tolist(), c[name].flatten().tolist(), w) for v, c, w in parts]
        entries = [
            rule(value, [(values[i], w) for values, counts, w in columns if counts[i]], everybody)
            for i, value in enumerate(tensor.flatten().tolist())
        ]
        new[name] = torch.tensor(entries, dtype=tensor.dtype).view_as(tensor)
    return new


# ── rules over the values of one entry ────────────────────────────────────────────────────────────


def weighted_mean(old, given, everybody):
    return sum(v * w for v, w in given) / sum(w for _, w in given) if given else old


def mean_of_changes(old, given, everybody):
    return old + sum((v - old) * w for v, w in given) / everybody if everybody else old


def mean_of_moved(old, given, everybody):
    return weighted_mean(old, [(v, w) for v, w in given if v != old], everybody)


def middle_value(old, given, everybody):
    return median(v for v, _ in given) if given else old


def trimmed(share):
    def rule(old, updates, everybody):
        values = sorted(v for v, _ in updates)
        cut = math.floor(len(values) * share + 1e-9)
        middle = values[cut : len(values) - cut]
        return sum(middle) / len(middle) if middle else old

    return rule


# ── local training ────────────────────────────────────────────────────────────────────────────────


def steps_of(
    setup: Setup, state: State, client: Client, start: Tensors, held: Tensors, gradient_of
) -> Tensors:
    """T epochs of SGD on dense tensors; `gradient_of(step, params, x, y)` says what a step goes
    down.
    """
    task, local = setup.task, setup.task.local
    params, velocity = dict(start), {name: torch.zeros_like(p) for name, p in start.items()}
    shard, step = task.source.shard(client.id), 0
    for epoch in range(local.epochs):
        draw = generator(task.seed, "shuffle", state.round, client.id, epoch)
        order = torch.randperm(len(shard.index), generator=draw)
        for first in range(0, len(order), local.batch_size):
            rows = shard.index[order[first : first + local.batch_size]]
            gradient = gradient_of(step, params, shard.samples.x[rows], shard.samples.y[rows])
            for name in params:
                change = gradient[name] * held[name] + local.weight_decay * params[name]
                velocity[name] = local.momentum * velocity[name] + change
                params[name] = params[name] - setup.lr(state.round) * velocity[name]
            step += 1
    return params


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of log(sum of e^z) - z of the right label."""
    losses = [
        torch.log(z.exp().sum()) - z[label] for z, label in zip(logits, y.tolist(), strict=True)
    ]
    return torch.stack(losses).mean()


def gradients(module, params: Tensors, x: Tensor, loss_of) -> Tensors:
    """The derivative of a loss of the logits by every parameter."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(
        loss_of(functional_call(module, leaves, (x,))), list(leaves.values())
    )
    return dict(zip(leaves, grads, strict=True))


def cut_to(held: Tensors, params: Tensors) -> Tensors:
    return {name: torch.where(held[name], p, 0.0) for name, p in params.items()}


def plain(setup, state, client, part) -> Slow:
    """SGD on the masked dense model; `more` is the mean over steps of the squared gradient before
    masking.
    """
    masks = part.mask(state.params)
    module = dense_module(setup.task.model.module, masks, setup.task.scaler)
    squares = {name: torch.zeros_like(p) for name, p in state.params.items()}
    taken = []

    def gradient_of(step, params, x, y):
        grads = gradients(module, params, x, lambda z: cross_entropy(z, y))
        for name, g in grads.items():
            squares[name] += g * g
        taken.append(step)
        return grads

    params = steps_of(setup, state, client, cut_to(masks, state.params), masks, gradient_of)
    return Slow(params, masks, {name: total / len(taken) for name, total in squares.items()})


def prox(mu: float):
    """FedProx: the gradient gets mu times the distance from what the client was sent."""

    def twin(setup, state, client, part) -> Slow:
        masks = part.mask(state.params)
        module, start_params = (
            dense_module(setup.task.model.module, masks, False),
            cut_to(masks, state.params),
        )

        def gradient_of(step, params, x, y):
            grads = gradients(module, params, x, lambda z: cross_entropy(z, y))
            return {name: g + mu * (params[name] - start_params[name]) for name, g in grads.items()}

        return Slow(steps_of(setup, state, client, start_params, masks, gradient_of), masks)

    return twin


def mask_absent_labels(absent: str, rows: bool):
    """HeteroFL's loss and rows: labels that a client lacks add e^0 (zero), nothing (ignore) or e^z
    (free).
    """

    def twin(setup, state, client, part) -> Slow:
        masks = part.mask(state.params)
        module = dense_module(setup.task.model.module, masks, setup.task.scaler)
        lacking = [
            label for label in range(setup.task.source.classes) if label not in client.labels
        ]

        def loss_of(logits, y):
            total = 0.0
            for z, label in zip(logits, y.tolist(), strict=True):
                sum_of_exponents = sum(z[k].exp() for k in client.labels)
                if absent == "zero":
                    sum_of_exponents = sum_of_exponents + len(lacking)
                if absent == "free":
                    sum_of_exponents = sum_of_exponents + sum(z[k].exp() for k in lacking)
                total = total + torch.log(sum_of_exponents) - z[label]
            return total / len(y)

        def gradient_of(step, params, x, y):
            return gradients(module, params, x, lambda z: loss_of(z, y))

        params = steps_of(setup, state, client, cut_to(masks, state.params), masks, gradient_of)
        counts = {name: mask.clone() for name, mask in masks.items()}
        for label in lacking if rows else ():
            counts["head.weight"][label] = False
            counts["head.bias"][label] = False
        return Slow(params, counts)

    return twin


# ── FjORD ─────────────────────────────────────────────────────────────────────────────────────────


def fjord(widths: tuple[float, ...], distil: float = 0.0):
    """A width per batch; the batch's model is really cut to that width, and its gradient put back
    into place.
    """

    def twin(setup, state, client, part) -> Slow:
        model, local = setup.task.model, setup.task.local
        masks = part.mask(state.params)
        levels = [width for width in sorted(widths) if width <= client.capacity + 1e-9] or [
            client.capacity
        ]
        inner = [_prefix(model.groups, level) for level in levels]
        rows = len(setup.task.source.shard(client.id).index)
        draw = generator(setup.task.seed, "fjord", state.round, client.id)
        drawn = torch.randint(
            len(levels), (local.epochs * math.ceil(rows / local.batch_size),), generator=draw
        )

        def small_model(params, slices):
            small = use_batch_statistics(submodel(model.module, slices, params)).train()
            return small, {name: p.detach() for name, p in small.named_parameters()}

        def put_back(grads, slices):
            full = {name: torch.zeros_like(p) for name, p in state.params.items()}
            for name, place in slices.mask(state.params).items():
                full[name][place] = grads[name].flatten()
            return full

        def gradient_of(step, params, x, y):
            chosen, widest = inner[int(drawn[step])], inner[-1]
            module, own = small_model(params, chosen)
            if not distil:
                return put_back(gradients(module, own, x, lambda z: cross_entropy(z, y)), chosen)
            large, largest = small_model(params, widest)
            taught_by = torch.softmax(functional_call(large, largest, (x,)), 1)

            def mixed(z):
                from_teacher = -(taught_by * torch.log_softmax(z, 1)).sum(1).mean()
                return (1 - distil) * cross_entropy(z, y) + distil * from_teacher

            first = put_back(gradients(module, own, x, mixed), chosen)
            second = put_back(gradients(large, largest, x, lambda z: cross_entropy(z, y)), widest)
            return {name: first[name] + second[name] for name in first}

        params = steps_of(setup, state, client, cut_to(masks, state.params), masks, gradient_of)
        reached = inner[-1].mask(state.params)
        return Slow(params, {name: mask & reached[name] for name, mask in masks.items()})

    return twin


def _prefix(groups, width: float) -> Slices:
    return Slices(
        groups, {g.name: torch.arange(max(1, math.floor(width * g.size + 1e-9))) for g in groups}
    )


def running_statistics(setup: Setup, state: State, client: Client, writes) -> Tensors:
    """The running statistics of a full-width client whose weights do not move, over the steps that
    may write.
    """
    module = copy.deepcopy(setup.task.model.module).train()

    def gradient_of(step, params, x, y):
        if writes(step):
            module(x)
        return {name: torch.zeros_like(p) for name, p in params.items()}

    steps_of(setup, state, client, state.params, state.params, gradient_of)
    return {
        name: t
        for name, t in module.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    }


# ── Hermes, FedMask, FIARSE ───────────────────────────────────────────────────────────────────────


def hermes(step: float, good_enough: float):
    """Clients that prune their own units; the units kept live in the twin, by client and group."""
    units_by_client: dict[int, dict[str, list[int]]] = {}

    def twin(setup, state, client, part) -> Slow:
        model = setup.task.model
        client_units = units_by_client.setdefault(
            client.id, {g.name: list(range(g.size)) for g in model.groups}
        )
        masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in state.params.items()}
        for group, cut, unit, place in _owned(model.groups, state.params):
            if unit not in client_units[group.name]:
                masks[cut.tensor].index_fill_(cut.axis, torch.tensor(place), False)
        module = dense_module(model.module, masks, False)
        params = steps_of(
            setup, state, client, cut_to(masks, state.params), masks,
            lambda step, params, x, y: gradients(module, params, x, lambda z: cross_entropy(z, y)),
        )  # fmt: skip
        shard = setup.task.source.shard(client.id)
        right = (
            functional_call(module, params, (shard.samples.x[shard.index],)).argmax(1)
            == shard.samples.y[shard.index]
        )
        if right.double().mean() >= good_enough:
            units_by_client[client.id] = _after_pruning(
                model.groups, params, client_units, client.capacity, step
            )
        return Slow(params, masks)

    twin.kept = units_by_client
    return twin


def _owned(groups, params):
    """(group, cut, unit, the places that the unit owns along the cut's axis), for all cuts of
    parameters.
    """
    for group in groups:
        for cut in group.cuts:
            for unit in range(group.size if cut.tensor in params else 0):
                first = cut.start + unit * cut.per_unit
                yield group, cut, unit, list(range(first, first + cut.per_unit))


def _after_pruning(groups, params, mine, capacity, step):
    length = {(group.name, unit): 0.0 for group in groups for unit in range(group.size)}
    for group, cut, unit, place in _owned(groups, params):
        length[group.name, unit] += float(
            (params[cut.tensor].index_select(cut.axis, torch.tensor(place)) ** 2).sum()
        )
    after = {}
    for group in groups:
        longest_first = sorted(
            mine[group.name], key=lambda unit, name=group.name: -length[name, unit]
        )
        goal = max(1, math.floor(capacity * group.size + 1e-9))
        after[group.name] = sorted(
            longest_first[: max(goal, math.floor(len(mine[group.name]) * (1 - step) + 1e-9))]
        )
    return after


def fedmask(original, start: float, threshold: float):
    """Scores over the weights of the `original` model; d loss / d score = d loss / d used weight *
    weight.
    """
    weights = {name: p.detach() for name, p in original.named_parameters()}

    def twin(setup, state, client, part) -> Slow:
        masks = part.mask(state.params)
        shape = {
            name: masks.get(name, torch.ones_like(p, dtype=torch.bool))
            for name, p in weights.items()
        }
        module = dense_module(original, shape, False)

        def gradient_of(step, scores, x, y):
            used = {
                n: w * (scores[n] >= threshold) if n in scores else w for n, w in weights.items()
            }
            grads = gradients(module, used, x, lambda z: cross_entropy(z, y))
            return {name: grads[name] * weights[name] for name in scores}

        scores = steps_of(setup, state, client, cut_to(masks, state.params), masks, gradient_of)
        return Slow(
            {name: torch.where(s >= threshold, start, 0.0).double() for name, s in scores.items()},
            masks,
        )

    return twin


def fiarse(scope: str, surrogate: bool = True):
    """w takes part where |w| >= tau; the derivative of w * mask(w) is mask + w * sign(w) * 2 tau /
    (|w| + tau)^2.
    """

    def twin(setup, state, client, part) -> Slow:
        masks, prunable = part.mask(state.params), setup.task.model.prunable
        module, start = (
            dense_module(setup.task.model.module, masks, False),
            cut_to(masks, state.params),
        )
        layers = {
            name: float(start[name][masks[name]].abs().min())
            for name in prunable
            if masks[name].any()
        }
        tau = {
            name: layers.get(name, math.inf) if scope == "layer" else min(layers.values())
            for name in prunable
        }

        def gradient_of(step, params, x, y):
            mask = {name: params[name].abs() >= tau[name] for name in prunable}
            used = {name: p * mask[name] if name in prunable else p for name, p in params.items()}
            grads = gradients(module, used, x, lambda z: cross_entropy(z, y))
            for name in prunable:
                slope = (
                    params[name].sign()
                    * 2
                    * tau[name]
                    / (params[name].abs() + tau[name]) ** 2
                    * surrogate
                )
                grads[name] = grads[name] * torch.where(mask[name], 1 + params[name] * slope, 0.0)
            return grads

        return Slow(steps_of(setup, state, client, start, masks, gradient_of), masks)

    return twin
