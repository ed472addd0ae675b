"""Replay of a kept round: train its clients again and measure the theorems' quantities."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.server.aggregation import WEIGHTS
from fedcover.server.round import aggregate, start_round
from fedcover.server.round_setup import Setup
from fedcover.tensors import squared_norm
from fedcover.theory import RoundQuantities
from fedcover.theory.certificate.global_loss import GlobalLoss, LossEvaluation
from fedcover.theory.certificate.holders import Holders
from fedcover.theory.certificate.trajectories import ClientTrajectory, TrajectoryProbe
from fedcover.types import Client, Params, State


@dataclass(frozen=True)
class ReplayedRound:
    """The quantities of a round, and the measured sides of the lemmas."""

    number: int
    quantities: RoundQuantities
    paths: tuple[ClientTrajectory, ...]
    value: float
    gradient: float
    """The squared length of the full gradient over all parameters that are ever trained."""
    dissimilarity: float
    """zeta^2: the mean squared distance of a client's gradient from the mean of all."""
    gamma: int
    """The fewest clients that train any parameter of those that are ever trained."""
    gradient_gap: float
    """The squared length of the mean gap of the clients' gradients (Lemma 2)."""
    noise: float
    """The squared length of the mean noise of the clients' batches (Lemma 3)."""
    curvature: float
    """The curvature of F between the models before and after the round; 0 if it hardly moved."""
    bias: Params = field(repr=False)
    """The mean of the holders' gradients at the global model, minus the full gradient."""


def replay_round(
    setup: Setup,
    state: State,
    global_loss: GlobalLoss,
    trained: Mapping[str, Tensor],
    num_probes: int,
    dropped: Collection[int] = (),
) -> ReplayedRound | None:
    """Train a kept round again and measure it.

    Args:
        setup: the setup of the run.
        state: the state before the round.
        global_loss: F.
        trained: True for each entry that some client trains in some round of the run.
        num_probes: at how many local steps each trajectory is examined.
        dropped: the clients that did not answer in the run.

    Returns:
        The measurements; None if no client answered.
    """
    theta = zero_untrained(state.params, trained)
    pending = start_round(setup, state)
    work = [(client, part) for client, part in pending.work if client.id not in dropped]
    if not work:
        return None
    clients = [client for client, _ in work]
    full = _evaluate_with_clients(global_loss, theta, [client.id for client in clients])
    probe = TrajectoryProbe(
        global_loss,
        theta,
        full.client_gradients,
        num_probes,
        every_batch=_has_uneven_batches(clients, setup.task.local.batch_size)
        or setup.task.local.momentum > 0,
    )
    lr = setup.lr(state.round)
    updates, paths = [], []
    for client, reduction in work:
        update, path = probe.train(setup.task, state, client, reduction, lr)
        updates.append(update)
        paths.append(path)
    updates.sort(key=lambda update: update.client.id)  # the order in which a round sums them
    after = zero_untrained(aggregate(setup, state, updates).params, trained)
    return _measure_round(setup, state, theta, after, full, global_loss, paths, trained)


def zero_untrained(params: Params, trained: Mapping[str, Tensor]) -> Params:
    """Set entries to zero that no client ever trains: the union of all sub-models."""
    return {name: torch.where(trained[name], tensor, 0) for name, tensor in params.items()}


def _evaluate_with_clients(
    global_loss: GlobalLoss, theta: Params, clients: list[int]
) -> LossEvaluation:
    """Evaluate F, and the gradients of these clients even if they are not part of F."""
    full = global_loss.evaluate(theta, keep=clients)
    gradients = dict(full.client_gradients)
    for client in clients:
        if client not in gradients:
            _, gradients[client] = global_loss.loss_and_gradient(theta, global_loss.rows(client))
    return replace(full, client_gradients=gradients)


def _has_uneven_batches(clients: list[Client], batch_size: int) -> bool:
    """Return whether batches of one client differ in size, or clients in numbers of batches."""
    sizes = [client.samples for client in clients]
    has_remainder = any(size % batch_size for size in sizes if size > batch_size)
    batch_counts = {-(-size // batch_size) for size in sizes}
    return has_remainder or len(batch_counts) > 1


# ── the quantities ──────────────────────────────────────────────────────────────────────────────


def _measure_round(
    setup: Setup,
    state: State,
    theta: Params,
    after: Params,
    full: LossEvaluation,
    global_loss: GlobalLoss,
    paths: list[ClientTrajectory],
    trained: Mapping[str, Tensor],
) -> ReplayedRound:
    """Compute all quantities of a round from the models around it and the clients' trajectories."""
    cohort = [(path.client, path.reduction) for path in paths]
    holders = Holders.of_cohort(theta, cohort, WEIGHTS[setup.experiment.weights])
    bias = holders.mean(
        [path.reduction.extract(full.client_gradients[path.client.id]) for path in paths]
    )
    batch_gradient = _mean_batch_gradient(paths, holders) if paths[0].batch_gradient else bias
    gradient_gap = holders.mean([path.gradient_gap for path in paths])
    noise = holders.mean([path.noise for path in paths])
    # Drop the vectors: there may be many rounds, and each vector is as large as a model.
    for path in paths:
        path.gradient_gap, path.noise, path.batch_gradient = {}, {}, {}
    dissimilarity = sum(tensor[trained[name]].sum() for name, tensor in full.dissimilarity.items())
    return ReplayedRound(
        number=state.round,
        quantities=RoundQuantities(
            lr=setup.lr(state.round),
            inverse_coverage=holders.largest_shares(),
            pruned_energy=tuple(path.pruned_energy for path in paths),
            gamma=holders.fewest(holders.covered),
            energy=squared_norm(theta.values()),
            gradient=squared_norm(entries_where(full.gradient, holders.covered)),
            bias=_squared_distance(bias, full.gradient, holders.covered),
            offset=_squared_distance(batch_gradient, full.gradient, holders.covered),
            spread=_sampling_spread(full.dissimilarity, holders, setup.experiment.clients),
            regions=holders.count_regions(),
        ),
        paths=tuple(paths),
        value=full.value,
        gradient=squared_norm(entries_where(full.gradient, trained)),
        gamma=holders.fewest(trained),
        dissimilarity=float(dissimilarity),
        gradient_gap=squared_norm(gradient_gap.values()),
        noise=squared_norm(noise.values()),
        curvature=_curvature(global_loss, theta, after, full),
        bias=_covered_difference(bias, full.gradient, holders),
    )


def _covered_difference(left: Params, right: Params, holders: Holders) -> Params:
    """Return a difference, with zeros for entries without a holder."""
    return {
        name: torch.where(holders.covered[name], tensor - right[name], 0)
        for name, tensor in left.items()
    }


def _mean_batch_gradient(paths: list[ClientTrajectory], holders: Holders) -> Params:
    """Return the clients' mean batch gradient at the global model, relative to the most steps."""
    most_steps = max(path.steps.total for path in paths)
    return holders.mean(
        [
            {name: tensor / most_steps for name, tensor in path.batch_gradient.items()}
            for path in paths
        ]
    )


def _sampling_spread(dissimilarity: Params, holders: Holders, num_clients: int) -> float:
    """Return the expected squared bias of a random cohort; see `RoundQuantities.spread`."""
    total = 0.0
    for name, zeta in dissimilarity.items():
        count = holders.counts[name]
        outside = num_clients - count.double()
        spread = zeta / count.clamp_min(1) * outside / max(1, num_clients - 1)
        total += float(spread[holders.covered[name]].sum())
    return total


def _squared_distance(left: Params, right: Params, where: Mapping[str, Tensor]) -> float:
    difference = {name: left[name] - right[name] for name in left}
    return squared_norm(entries_where(difference, where))


def entries_where(tensors: Params, where: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the entries of each tensor where its mask is True."""
    return (tensor[where[name]] for name, tensor in tensors.items())


def _curvature(
    global_loss: GlobalLoss, theta: Params, after: Params, full: LossEvaluation
) -> float:
    """Return the curvature of F between two models: twice its rise above the tangent, per distance.

    Returns 0 if that cannot be told from rounding errors.
    """
    change = {name: after[name].double() - theta[name].double() for name in theta}
    squared_distance = squared_norm(change.values())
    if squared_distance <= 1e-10 * max(squared_norm(theta.values()), 1e-30):
        return 0.0
    slope = float(
        sum((full.gradient[name].double() * tensor).sum() for name, tensor in change.items())
    )
    rise = global_loss.evaluate(after).value - full.value - slope
    rounding = 1e-12 if global_loss.dtype == torch.float64 else 1e-5
    return 2 * rise / squared_distance if abs(rise) > rounding * abs(full.value) else 0.0
