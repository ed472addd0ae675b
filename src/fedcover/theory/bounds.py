"""The right-hand sides: the paper's theorems as printed and corrected, and sharper ones; docs/theory.md proves them.

All bound the mean over rounds of the squared length of the full gradient (over the parameters that a round trains). All
but the last hold in expectation over the batches; the last holds surely.
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
    """The largest learning rate of any round."""
    return max(r.lr for r in rounds)


def left_side(rounds: Sequence[RoundQuantities]) -> float:
    """What is bounded: the mean squared gradient, over the parameters that each round trains."""
    return lr_weighted_mean(rounds, lambda r: r.gradient)


def worst_case(rounds: Sequence[RoundQuantities]) -> tuple[int, int, float]:
    """N, Gamma and delta^2 as the paper has them: the most clients, the least coverage, the largest share cut away."""
    shares = [max(r.pruned_energy, default=0.0) / r.energy if r.energy else 0.0 for r in rounds]
    return max(r.clients for r in rounds), min(r.gamma for r in rounds), max(shares)


def printed_one(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1 as printed: G_0/sqrt(Q) + V_0/(T sqrt(Q)) + H_0/Q + I_0/Gamma * mean |theta|^2."""
    clients, gamma, delta = worst_case(rounds)
    squared, root, steps = known.smoothness**2, math.sqrt(known.rounds), known.steps.count
    terms = {
        "start": 4 * known.start / root,
        "variance": 6 * known.smoothness * clients * known.variance / gamma**2 / (steps * root),
        "drift": 2 * squared * clients * known.gradient / gamma / known.rounds,
        "noise": 3
        * squared
        * delta
        * clients
        / gamma
        * lr_weighted_mean(rounds, lambda r: r.energy),
    }
    lr = largest_lr(rounds)
    conditions = (
        Condition("learning rate <= 1/(6 L T)", 1 / (6 * known.smoothness * steps), lr),
        Condition("learning rate <= 1/(T sqrt(Q))", 1 / (steps * root), lr),
    )
    return Bound("Theorem 1 as printed", terms, conditions, left_side(rounds))


def printed_two(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 2 as printed: G_1/sqrt(TQ) + V_0/sqrt(Q) + I_0/Gamma * mean |theta|^2, with K regions."""
    clients, gamma, delta = worst_case(rounds)
    squared, root = known.smoothness**2, math.sqrt(known.steps.count * known.rounds)
    regions = max(r.regions for r in rounds)
    terms = {
        "start": 4 * known.start / root,
        "variance in G_1": 6 * known.smoothness * regions * known.variance / root,
        "variance in V_0": 6
        * known.smoothness
        * clients
        * known.variance
        / gamma**2
        / math.sqrt(known.rounds),
        "noise": 3
        * squared
        * delta
        * clients
        / gamma
        * lr_weighted_mean(rounds, lambda r: r.energy),
    }
    lr = largest_lr(rounds)
    conditions = (
        Condition("learning rate <= 1/(6 L T)", 1 / (6 * known.smoothness * known.steps.count), lr),
        Condition("learning rate <= 1/sqrt(T Q)", 1 / root, lr),
    )
    return Bound("Theorem 2 as printed", terms, conditions, left_side(rounds))


def corrected_one(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1 by the paper's own route, with the constants that it gives, for any learning rate up to 1/(6LT)."""
    return _corrected("Theorem 1 corrected", known, rounds, lambda r: r.clients / r.gamma**2)


def corrected_two(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 2 by the same route: the variance of the whole averaged vector once, not once for every region."""
    return _corrected("Theorem 2 corrected", known, rounds, squared_inverse)


def _corrected(
    name: str,
    known: Constants,
    rounds: Sequence[RoundQuantities],
    averaging: Callable[[RoundQuantities], float],
) -> Bound:
    length, steps = known.smoothness, known.steps.count
    terms = {
        "start": 4 * (known.start - known.least) / (steps * known.lr_sum),
        "variance": 6
        * length
        * known.variance
        * lr_weighted_mean(rounds, lambda r: r.lr * averaging(r)),
        "drift": length**2
        * steps**2
        * known.gradient
        * lr_weighted_mean(rounds, lambda r: r.lr**2 * r.clients / r.gamma),
        "noise": 3 * length**2 * lr_weighted_mean(rounds, lambda r: sum(r.pruned_energy) / r.gamma),
    }
    condition = Condition(
        "learning rate <= 1/(6 L T)", 1 / (6 * length * steps), largest_lr(rounds)
    )
    return Bound(name, terms, (condition,), left_side(rounds))


def sharper(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1': clients with equal data; every client counts with its own coverage; momentum allowed."""
    return _sharper("Theorem 1'", known, rounds)


def sharper_biased(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem 1' where clients' data differ: a bias joins the gap, which no step size removes."""
    bound = _sharper("Theorem 1' with data bias", known, rounds)
    own = {"smoothness": known.smoothness, "gradient": known.gradient}
    bias = lr_weighted_mean(
        rounds, lambda r: _squared_increase(sum(gradient_gap(known, r, **own)), r.bias)
    )
    return replace(bound, terms={**bound.terms, "bias": bias})


def _sharper(name: str, known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    length, total = known.smoothness, known.steps.total
    variance = known.variance * known.steps.squares
    terms = {
        "start": 2 * (known.start - known.least) / (total * known.lr_sum),
        "variance": 2
        * length
        * variance
        * lr_weighted_mean(rounds, lambda r: r.lr * squared_inverse(r)),
        **_gaps(known, rounds, smoothness=length, gradient=known.gradient),
    }
    condition = Condition(
        "learning rate <= 1/(2 L S)", 1 / (2 * length * total), largest_lr(rounds)
    )
    return Bound(name, terms, (condition,), left_side(rounds))


def partial_participation(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """A uniform cohort out of M clients whose masks do not depend on who they are: the bias vanishes on average."""
    length, total = known.smoothness, known.steps.total
    variance = known.variance * known.steps.squares
    gaps = _gaps(known, rounds, smoothness=length, gradient=known.gradient)
    terms = {
        "start": 8 / 3 * (known.start - known.least) / (total * known.lr_sum),
        "variance": 16
        / 3
        * length
        * variance
        * lr_weighted_mean(rounds, lambda r: r.lr * squared_inverse(r)),
        **{name: 2 * term for name, term in gaps.items()},
        "sampling": 8 / 3 * length * total * lr_weighted_mean(rounds, lambda r: r.lr * r.spread),
    }
    condition = Condition(
        "learning rate <= 1/(8 L S)", 1 / (8 * length * total), largest_lr(rounds)
    )
    return Bound("Partial participation", terms, (condition,), left_side(rounds))


def reshuffled(known: Constants, rounds: Sequence[RoundQuantities]) -> Bound:
    """Theorem R: whatever batches were taken in whatever order; no expectation, no variance, half the condition."""
    total = known.steps.total
    own = {"smoothness": known.batch_smoothness, "gradient": known.step_gradient}
    terms = {
        "start": 2 * (known.start - known.least) / (total * known.lr_sum),
        **_gaps(known, rounds, **own),
        "offset": lr_weighted_mean(
            rounds, lambda r: _squared_increase(sum(gradient_gap(known, r, **own)), r.offset)
        ),
    }
    condition = Condition(
        "learning rate <= 1/(L S)", 1 / (known.smoothness * total), largest_lr(rounds)
    )
    return Bound("Theorem R (reshuffled epochs, surely)", terms, (condition,), left_side(rounds))


def _gaps(
    known: Constants, rounds: Sequence[RoundQuantities], *, smoothness: float, gradient: float
) -> dict[str, float]:
    """Lemma 2's two parts, as means over the rounds."""
    own = {"smoothness": smoothness, "gradient": gradient}
    return {
        "drift": lr_weighted_mean(rounds, lambda r: gradient_gap(known, r, **own)[0]),
        "noise": lr_weighted_mean(rounds, lambda r: gradient_gap(known, r, **own)[1]),
    }


def _squared_increase(first: float, second: float) -> float:
    """What a second error adds to the square of a first: (a + b)^2 - a^2, from the squares of both."""
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
