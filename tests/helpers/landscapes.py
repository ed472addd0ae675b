"""Small random problems on which every expectation is computed exactly: quadratics, masks, and
noise of fair signs.

Suffixes: S outcomes of all coins together, N clients, P parameters, T steps.
"""

from dataclasses import dataclass, replace
from itertools import permutations, product

import torch

from fedcover.theory import Constants, LocalSteps, RoundQuantities


@dataclass(frozen=True)
class Problem:
    """Clients with F_n(theta) = (theta - a_n)' H_n (theta - a_n) / 2, a mask each, and +-noise on
    gradients.
    """

    hessian_NPP: torch.Tensor
    centre_NP: torch.Tensor
    noise_NTP: torch.Tensor
    mask_NP: torch.Tensor
    theta_P: torch.Tensor
    lr: float
    steps: LocalSteps
    weight_N: torch.Tensor

    @property
    def smoothness(self):
        return float(torch.linalg.matrix_norm(self.hessian_NPP, 2).max())

    @property
    def shares(self):
        """With which weight a client counts for a parameter."""
        held_NP = self.weight_N[:, None] * self.mask_NP
        return held_NP / held_NP.sum(0).clamp_min(1e-300)

    @property
    def covered(self):
        return self.mask_NP.any(0)


def random_problem(seed, *, equal_data, noisy=True, weighted=False):
    """A problem of up to 3 clients, 3 steps and 5 parameters; half of them are not convex."""
    g = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    clients, steps, size = number(1, 3), number(1, 3), number(1, 5)
    count = 1 if equal_data else clients
    root = torch.randn(count, size, size, generator=g, dtype=torch.float64)
    hessian = root @ root.mT if number(0, 1) else root + root.mT
    centre = torch.randn(count, size, generator=g, dtype=torch.float64)
    noise = (
        torch.randn(clients, steps, size, generator=g, dtype=torch.float64) * noisy * number(0, 3)
    )
    mask = torch.rand(clients, size, generator=g) < 0.6
    theta = torch.randn(size, generator=g, dtype=torch.float64) * number(1, 3)
    momentum = (0.0, 0.5, 0.9)[number(0, 2)]
    weight = (
        torch.rand(clients, generator=g, dtype=torch.float64) + 0.1
        if weighted
        else torch.ones(clients)
    )
    return Problem(
        hessian.expand(clients, -1, -1), centre.expand(clients, -1), noise, mask, theta, 1.0,
        LocalSteps(steps, momentum), weight.double(),
    )  # fmt: skip


def with_rate(problem, share, limit):
    """The problem with a learning rate that is a share of limit / (L S)."""
    return replace(problem, lr=share * limit / (problem.smoothness * problem.steps.total))


def value(hessian_PP, centre_P, theta):
    away = theta - centre_P
    return (away @ hessian_PP * away).sum(-1) / 2


def objective(problem, clients=None):
    """F as a function of many models: the mean over the given clients (all by default)."""
    which = range(len(problem.mask_NP)) if clients is None else clients

    def total(theta):
        values = [value(problem.hessian_NPP[n], problem.centre_NP[n], theta) for n in which]
        return torch.stack(values).mean(0)

    return total


def gradient_at(problem, n, theta):
    return (theta - problem.centre_NP[n]) @ problem.hessian_NPP[n]


def one_round(problem):
    """All outcomes of a round: the models after it, every client's path, and every gradient that
    was stepped along.
    """
    clients, steps, _ = problem.noise_NTP.shape
    signs = torch.tensor(list(product((1.0, -1.0), repeat=clients * steps)), dtype=torch.float64)
    signs_SNT = signs.view(-1, clients, steps)
    paths, gradients, ends = [], [], []
    for n in range(clients):
        m = problem.mask_NP[n].double()
        theta = (problem.theta_P * m).expand(len(signs), -1)
        velocity = torch.zeros_like(theta)
        path, taken = [], []
        for t in range(steps):
            g = (
                gradient_at(problem, n, theta) + signs_SNT[:, n, t, None] * problem.noise_NTP[n, t]
            ) * m
            path.append(theta)
            taken.append(g)
            velocity = problem.steps.momentum * velocity + g
            theta = theta - problem.lr * velocity
        paths.append(torch.stack(path))
        gradients.append(torch.stack(taken))
        ends.append(theta)
    after = torch.einsum("np,nsp->sp", problem.shares, torch.stack(ends))
    return torch.where(problem.covered, after, problem.theta_P), paths, gradients


def constants(problem, start, end, gradients):
    """The theorem's exact constants for one round, with its final loss as lower bound of F."""
    means = [float(g_TSP.square().sum(-1).mean(1).max()) for g_TSP in gradients]
    noise = (problem.noise_NTP * problem.mask_NP[:, None]).square().sum(-1)
    return Constants(
        smoothness=problem.smoothness,
        batch_smoothness=problem.smoothness,
        gradient=max(means),
        step_gradient=max(float(g.square().sum(-1).max()) for g in gradients),
        variance=float(noise.max()),
        start=start,
        least=end,
        steps=problem.steps,
        rounds=1,
        lr_sum=problem.lr,
    )


def masks_say(problem, full_gradient):
    """What the masks of the round say."""
    largest = [
        float(problem.shares[n][problem.mask_NP[n]].max()) if problem.mask_NP[n].any() else 0.0
        for n in range(len(problem.mask_NP))
    ]
    pruned_energy = (problem.theta_P * ~problem.mask_NP).square().sum(1).tolist()
    counts = problem.mask_NP.sum(0)
    mean = sum(
        problem.shares[n] * gradient_at(problem, n, problem.theta_P) for n in range(len(largest))
    )
    return RoundQuantities(
        lr=problem.lr,
        inverse_coverage=tuple(largest),
        pruned_energy=tuple(pruned_energy),
        gamma=int(counts[counts > 0].min()),
        energy=float(problem.theta_P.square().sum()),
        gradient=float(full_gradient[problem.covered].square().sum()),
        bias=float((mean - full_gradient)[problem.covered].square().sum()),
    )


def cohorts(clients, places):
    """Every way to put clients into the places of a cohort."""
    return list(permutations(range(clients), places))
