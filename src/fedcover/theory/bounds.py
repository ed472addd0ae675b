"""The bounds of the convergence theorems: as printed in the paper, corrected, and sharper.

Each function computes the right-hand side of one theorem, term by term. docs/theory.md has the
proofs. All bound the mean, over rounds, of the squared length of the full gradient over the
parameters that a round trains. All but `reshuffled` hold in expectation over the batches;
`reshuffled` always holds.

The letters of the theory: L smoothness, T local steps, S their weighted total (`LocalSteps.total`),
Q rounds, N clients of a round, Gamma the least coverage, G the gradient bound, theta the model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedcover.theory.quantities import (
    Bound,
    Condition,
    Constants,
    RoundQuantities,
    gradient_gap,
    lr_weighted_mean,
    squared_inverse,
)


def largest_lr(rounds: Sequence[RoundQuantities]) -> float:
    """Return the largest learning rate of any round."""
    return max(r.lr for r in rounds)


def left_side(rounds: Sequence[RoundQuantities]) -> float:
    """Return the bounded quantity: the mean squared gradient over each round's parameters."""
    return lr_weighted_mean(rounds, lambda r: r.gradient)


# ── as printed ──────────────────────────────────────────────────────────────────────────────────


def worst_case(rounds: Sequence[RoundQuantities]) -> tuple[int, int, float]:
    """Return N, Gamma and delta^2 of the paper.

    These are the most clients, the least coverage, and the largest pruned share of the energy.
    """
    shares = [max(r.pruned_energy, default=0.0) / r.energy if r.energy else 0.0 for r in rounds]
    return max(r.clients for r in rounds), min(r.gamma for r in rounds), max(shares)


def printed_one(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1 as printed: G_0/sqrt(Q) + V_0/(T sqrt(Q)) + H_0/Q + I_0/Gamma * mean |theta|^2."""
    clients, gamma, _ = worst_case(rounds)
    smoothness, steps = constants.smoothness, constants.steps.count
    root = math.sqrt(constants.rounds)
    terms = {
        "start": 4 * constants.start / root,
        "variance": 6 * smoothness * clients * constants.variance / gamma**2 / (steps * root),
        "drift": 2 * smoothness**2 * clients * constants.gradient / gamma / constants.rounds,
        "noise": _printed_noise(constants, rounds),
    }
    lr = largest_lr(rounds)
    conditions = (
        Condition("learning rate <= 1/(6 L T)", 1 / (6 * smoothness * steps), lr),
        Condition("learning rate <= 1/(T sqrt(Q))", 1 / (steps * root), lr),
    )
    return Bound("Theorem 1 as printed", terms, conditions, left_side(rounds))


def printed_two(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 2 as printed: G_1/sqrt(TQ) + V_0/sqrt(Q) + I_0/Gamma * mean |theta|^2.

    K regions of parameters are trained by different sets of clients.
    """
    clients, gamma, _ = worst_case(rounds)
    smoothness, steps = constants.smoothness, constants.steps.count
    root = math.sqrt(steps * constants.rounds)
    regions = max(r.regions for r in rounds)
    variance_0 = 6 * smoothness * clients * constants.variance / gamma**2
    terms = {
        "start": 4 * constants.start / root,
        "variance in G_1": 6 * smoothness * regions * constants.variance / root,
        "variance in V_0": variance_0 / math.sqrt(constants.rounds),
        "noise": _printed_noise(constants, rounds),
    }
    lr = largest_lr(rounds)
    conditions = (
        Condition("learning rate <= 1/(6 L T)", 1 / (6 * smoothness * steps), lr),
        Condition("learning rate <= 1/sqrt(T Q)", 1 / root, lr),
    )
    return Bound("Theorem 2 as printed", terms, conditions, left_side(rounds))


def _printed_noise(constants: Constants, rounds: Sequence[RoundQuantities]) -> float:
    """Return the term I_0/Gamma * mean |theta|^2."""
    clients, gamma, delta_squared = worst_case(rounds)
    factor = 3 * constants.smoothness**2 * delta_squared * clients / gamma
    return factor * lr_weighted_mean(rounds, lambda r: r.energy)


# ── corrected ───────────────────────────────────────────────────────────────────────────────────


def corrected_one(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1 with the constants that the paper's proof yields, for learning rates <= 1/(6LT)."""
    return _corrected("Theorem 1 corrected", constants, rounds, lambda r: r.clients / r.gamma**2)


def corrected_two(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 2 by the same proof: the variance counts once, not once for every region."""
    return _corrected("Theorem 2 corrected", constants, rounds, squared_inverse)


def _corrected(
    name: str,
    constants: Constants,
    rounds: Sequence[RoundQuantities],
    variance_factor: Callable[[RoundQuantities], float],
) -> Bound:
    smoothness, steps = constants.smoothness, constants.steps.count
    mean_variance_factor = lr_weighted_mean(rounds, lambda r: r.lr * variance_factor(r))
    mean_drift = lr_weighted_mean(rounds, lambda r: r.lr**2 * r.clients / r.gamma)
    mean_noise = lr_weighted_mean(rounds, lambda r: sum(r.pruned_energy) / r.gamma)
    terms = {
        "start": 4 * (constants.start - constants.least) / (steps * constants.lr_sum),
        "variance": 6 * smoothness * constants.variance * mean_variance_factor,
        "drift": smoothness**2 * steps**2 * constants.gradient * mean_drift,
        "noise": 3 * smoothness**2 * mean_noise,
    }
    allowed = 1 / (6 * smoothness * steps)
    condition = Condition("learning rate <= 1/(6 L T)", allowed, largest_lr(rounds))
    return Bound(name, terms, (condition,), left_side(rounds))


# ── sharper ─────────────────────────────────────────────────────────────────────────────────────


def sharper(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1': equal data; every client counts with its own coverage; momentum allowed."""
    return _sharper("Theorem 1'", constants, rounds)


def sharper_biased(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1' for clients with different data: adds a bias that no learning rate removes."""
    bound = _sharper("Theorem 1' with data bias", constants, rounds)
    smoothness, gradient = constants.smoothness, constants.gradient

    def bias_of(r: RoundQuantities) -> float:
        gap = gradient_gap(constants, r, smoothness=smoothness, gradient=gradient)
        return _squared_increase(sum(gap), r.bias)

    return replace(bound, terms={**bound.terms, "bias": lr_weighted_mean(rounds, bias_of)})


def _sharper(name: str, constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    smoothness, total = constants.smoothness, constants.steps.total
    variance = constants.variance * constants.steps.squares
    mean_inverse = lr_weighted_mean(rounds, lambda r: r.lr * squared_inverse(r))
    terms = {
        "start": 2 * (constants.start - constants.least) / (total * constants.lr_sum),
        "variance": 2 * smoothness * variance * mean_inverse,
        **_gaps(constants, rounds, smoothness=smoothness, gradient=constants.gradient),
    }
    condition = Condition(
        "learning rate <= 1/(2 L S)", 1 / (2 * smoothness * total), largest_lr(rounds)
    )
    return Bound(name, terms, (condition,), left_side(rounds))


def partial_participation(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """A random cohort out of M clients whose masks do not depend on who they are.

    The bias then vanishes on average.
    """
    smoothness, total = constants.smoothness, constants.steps.total
    variance = constants.variance * constants.steps.squares
    mean_inverse = lr_weighted_mean(rounds, lambda r: r.lr * squared_inverse(r))
    mean_spread = lr_weighted_mean(rounds, lambda r: r.lr * r.spread)
    gaps = _gaps(constants, rounds, smoothness=smoothness, gradient=constants.gradient)
    terms = {
        "start": 8 / 3 * (constants.start - constants.least) / (total * constants.lr_sum),
        "variance": 16 / 3 * smoothness * variance * mean_inverse,
        **{name: 2 * term for name, term in gaps.items()},
        "sampling": 8 / 3 * smoothness * total * mean_spread,
    }
    condition = Condition(
        "learning rate <= 1/(8 L S)", 1 / (8 * smoothness * total), largest_lr(rounds)
    )
    return Bound("Partial participation", terms, (condition,), left_side(rounds))


def reshuffled(constants: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem R: for any batches in any order; no expectation, no variance, half the condition."""
    total = constants.steps.total
    smoothness, gradient = constants.batch_smoothness, constants.step_gradient

    def offset_of(r: RoundQuantities) -> float:
        gap = gradient_gap(constants, r, smoothness=smoothness, gradient=gradient)
        return _squared_increase(sum(gap), r.offset)

    terms = {
        "start": 2 * (constants.start - constants.least) / (total * constants.lr_sum),
        **_gaps(constants, rounds, smoothness=smoothness, gradient=gradient),
        "offset": lr_weighted_mean(rounds, offset_of),
    }
    condition = Condition(
        "learning rate <= 1/(L S)", 1 / (constants.smoothness * total), largest_lr(rounds)
    )
    return Bound("Theorem R (reshuffled epochs, surely)", terms, (condition,), left_side(rounds))


def _gaps(
    constants: Constants, rounds: Sequence[RoundQuantities], *, smoothness: float, gradient: float
) -> dict[str, float]:
    """Return the two parts of Lemma 2, as means over the rounds."""

    def gap(r: RoundQuantities) -> tuple[float, float]:
        return gradient_gap(constants, r, smoothness=smoothness, gradient=gradient)

    return {
        "drift": lr_weighted_mean(rounds, lambda r: gap(r)[0]),
        "noise": lr_weighted_mean(rounds, lambda r: gap(r)[1]),
    }


def _squared_increase(first: float, second: float) -> float:
    """Return (a + b)^2 - a^2 for the squares of a and b: what a second error adds to a first."""
    return second + 2 * math.sqrt(first * second)


BOUNDS: dict[str, Callable[[Constants, Sequence[RoundQuantities]], Bound]] = {
    "printed_one": printed_one,
    "printed_two": printed_two,
    "corrected_one": corrected_one,
    "corrected_two": corrected_two,
    "sharper": sharper,
    "sharper_biased": sharper_biased,
    "partial_participation": partial_participation,
    "reshuffled": reshuffled,
}
"""All bounds, by their keys in a certificate."""
