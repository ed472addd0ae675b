"""A kept round, trained again and watched: what its masks and gradients say, in the theorems' words."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.server.aggregation import WEIGHTS
from fedcover.server.round import aggregate, start_round
from fedcover.server.round_setup import Setup
from fedcover.submodels import coverage as cov
from fedcover.theory import RoundQuantities
from fedcover.theory.certificate.global_loss import GlobalLoss, LossEvaluation, squared_norm
from fedcover.theory.certificate.trajectories import ClientTrajectory, TrajectoryProbe
from fedcover.types import Params, State


@dataclass(frozen=True)
class ReplayedRound:
    """One round as the theorems see it, and the lemmas' left-hand sides in it."""

    number: int
    quantities: RoundQuantities
    paths: tuple[ClientTrajectory, ...]
    value: float
    gradient: float
    """The squared length of the full gradient over all parameters that are ever trained."""
    dissimilarity: float
    """zeta^2: the mean squared distance of a client's own gradient from the mean of all clients'."""
    gamma: int
    """The fewest clients that train any parameter of those that are ever trained."""
    gradient_gap: float
    noise: float
    curvature: float
    """Of F along the way that the global model went in this round; 0 where it hardly moved."""
    bias: Params = field(repr=False)
    """The mean of the holders' own gradients at the global model, less the full one."""


def replay_round(
    setup: Setup,
    state: State,
    global_loss: GlobalLoss,
    trained: Mapping[str, Tensor],
    num_probes: int,
    dropped: Collection[int] = (),
) -> ReplayedRound | None:
    """Train a kept round again, watching every client; None if nobody answered in it.

    `trained` says which parameters are trained at any time; who was `dropped` in the run is so again.
    """
    theta = zero_untrained(state.params, trained)
    work = [
        (client, part)
        for client, part in start_round(setup, state).work
        if client.id not in dropped
    ]
    if not work:
        return None
    full = global_loss.evaluate(theta, keep=[client.id for client, _ in work])
    absent = [client.id for client, _ in work if client.id not in full.client_gradients]
    client_gradients = full.client_gradients | {
        id: global_loss.loss_and_gradient(theta, global_loss.rows(id))[1] for id in absent
    }
    size, rows = setup.task.local.batch_size, [client.samples for client, _ in work]
    uneven = (
        any(count % size for count in rows if count > size)
        or len({-(-count // size) for count in rows}) > 1
    )
    watcher = TrajectoryProbe(
        global_loss, theta, client_gradients, num_probes, uneven or setup.task.local.momentum > 0
    )
    lr = setup.lr(state.round)
    seen = [watcher.train(setup.task, state, client, reduction, lr) for client, reduction in work]
    updates = sorted(
        (update for update, _ in seen), key=lambda update: update.client.id
    )  # as a round adds them up
    moved = zero_untrained(aggregate(setup, state, updates).params, trained)
    paths = [path for _, path in seen]
    return _measure_round(
        setup,
        state,
        theta,
        moved,
        replace(full, client_gradients=client_gradients),
        global_loss,
        paths,
        trained,
    )


def zero_untrained(params: Params, trained: Mapping[str, Tensor]) -> Params:
    """The union of all local models: parameters that nobody ever trains are zero, as every client sees them."""
    return {name: torch.where(trained[name], tensor, 0) for name, tensor in params.items()}


def _measure_round(
    setup: Setup, state: State, theta: Params, after: Params, full: LossEvaluation, global_loss: GlobalLoss, paths: list[ClientTrajectory],
    trained: Mapping[str, Tensor],
) -> ReplayedRound:  # fmt: skip
    weight = WEIGHTS[setup.weights]
    total = _zeros(theta)
    for path in paths:
        path.reduction.add_into(total, None, weight(path.client))
    counts = cov.count(theta, [path.reduction for path in paths])
    covered = {name: tensor > 0 for name, tensor in counts.items()}
    held = [path.reduction.mask(theta) for path in paths]
    inverse_coverage = [
        weight(path.client)
        / min(float(total[name][bits].min()) for name, bits in mask.items() if bool(bits.any()))
        for path, mask in zip(paths, held, strict=True)
    ]

    def averaged(vectors: list[Params]) -> Params:
        return _coverage_mean(vectors, paths, total, [weight(path.client) for path in paths])

    bias = averaged(
        [path.reduction.extract(full.client_gradients[path.client.id]) for path in paths]
    )
    most = max(path.steps.total for path in paths)
    batch_gradient = (
        averaged([{n: t / most for n, t in path.batch_gradient.items()} for path in paths])
        if paths[0].batch_gradient
        else bias
    )
    spread = {
        name: zeta_P
        / counts[name].clamp_min(1)
        * (setup.clients - counts[name].double())
        / max(1, setup.clients - 1)
        for name, zeta_P in full.dissimilarity.items()
    }
    gradient_gap, noise = (
        averaged([path.gradient_gap for path in paths]),
        averaged([path.noise for path in paths]),
    )
    for path in (
        paths
    ):  # a certificate may look at many rounds, and a path's vectors are as large as a model
        path.gradient_gap, path.noise, path.batch_gradient = {}, {}, {}
    change = {name: (after[name].double() - theta[name].double()) for name in theta}
    quantities = RoundQuantities(
        lr=setup.lr(state.round),
        inverse_coverage=tuple(inverse_coverage),
        pruned_energy=tuple(path.pruned_energy for path in paths),
        gamma=_smallest_count(counts, covered),
        energy=squared_norm(theta),
        gradient=squared_norm(full.gradient, covered),
        bias=_squared_distance(bias, full.gradient, covered),
        offset=_squared_distance(batch_gradient, full.gradient, covered),
        spread=sum(float(tensor[covered[name]].sum()) for name, tensor in spread.items()),
        regions=_count_regions(held),
    )
    return ReplayedRound(
        number=state.round, quantities=quantities, paths=tuple(paths), value=full.value,
        gradient=squared_norm(full.gradient, trained), gamma=_smallest_count(counts, trained),
        dissimilarity=float(sum(tensor[trained[name]].sum() for name, tensor in full.dissimilarity.items())),
        gradient_gap=squared_norm(gradient_gap), noise=squared_norm(noise),
        curvature=_curvature(global_loss, theta, after, change, full),
        bias={name: torch.where(covered[name], tensor - full.gradient[name], 0) for name, tensor in bias.items()},
    )  # fmt: skip


def _coverage_mean(
    vectors: list[Params], paths: list[ClientTrajectory], total: Params, weights: list[float]
) -> Params:
    """The weighted mean over the clients that hold each parameter, zero where nobody does."""
    found = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
    for vector, path, weight in zip(vectors, paths, weights, strict=True):
        path.reduction.add_into(found, {n: t.double() for n, t in vector.items()}, weight)
    return {
        name: torch.where(total[name] > 0, tensor / total[name], 0)
        for name, tensor in found.items()
    }


def _smallest_count(counts: Params, where: Mapping[str, Tensor]) -> int:
    """The smallest count at some places."""
    return min(
        int(tensor[where[name]].min()) for name, tensor in counts.items() if bool(where[name].any())
    )


def _squared_distance(left: Params, right: Params, where: Mapping[str, Tensor]) -> float:
    return squared_norm({name: left[name] - right[name] for name in left}, where)


def _curvature(
    global_loss: GlobalLoss, theta: Params, after: Params, change: Params, full: LossEvaluation
) -> float:
    """Twice what F rose above its tangent, over the squared way; only where that is no mere rounding."""
    way = squared_norm(change)
    if way <= 1e-10 * max(squared_norm(theta), 1e-30):
        return 0.0
    slope = float(
        sum((full.gradient[name].double() * tensor).sum() for name, tensor in change.items())
    )
    above = global_loss.evaluate(after).value - full.value - slope
    rounding = 1e-12 if global_loss.dtype == torch.float64 else 1e-5
    return 2 * above / way if abs(above) > rounding * abs(full.value) else 0.0


def _count_regions(held: list[dict[str, Tensor]]) -> int:
    """How many different sets of clients hold some parameter: each set has its own sum of random numbers."""
    draw = torch.Generator().manual_seed(0)
    marks = torch.randint(1, 2**52, (len(held),), generator=draw).tolist()
    found: set[int] = set()
    for name in held[0]:
        sums = sum(mask[name].long() * mark for mask, mark in zip(held, marks, strict=True))
        assert isinstance(sums, Tensor)
        found |= set(torch.unique(sums).tolist())
    return len(found - {0})


def _zeros(like: Params) -> Params:
    return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in like.items()}
