"""The certificate as plain data: what JSON and the report show."""

from statistics import fmean
from typing import Any

from fedcover.theory import Bound
from fedcover.theory.certificate.constants import Seen
from fedcover.theory.certificate.replay import Replayed
from fedcover.theory.quantities import gap, squared_inverse

USED = {"reshuffled": ("L", "L_batch", "G_step", "F_0", "F_least")}
"""The constants of a bound, where they are not the usual ones."""

USUAL = ("L", "G", "sigma2", "F_0", "F_least")


def told(name: str, seen: Seen) -> dict[str, Any]:
    """Everything, in the order in which one would read it."""
    facts = [r.facts for r in seen.case.rounds]
    never = {key: int((~bits).sum()) for key, bits in seen.trained.items()}
    bounds = {key: _bound(key, bound, seen) for key, bound in seen.bounds.items()}
    return {
        "run": name,
        "kind": "certificate" if any(bound["genuine"] for bound in bounds.values()) else "estimate",
        "rounds": seen.done,
        "replayed": [r.number for r in seen.case.rounds],
        "local_steps": seen.case.known.steps.count,
        "constants": {
            key: {"value": known.value, "kind": known.kind, "how": known.how} for key, known in seen.constants.items()
        },
        "coverage": {
            "gamma": 0 if sum(never.values()) else min(r.gamma for r in seen.case.rounds),
            "gamma_union": min(r.gamma for r in seen.case.rounds),
            "never_trained": sum(never.values()),
            "gamma_client": [min(1 / max(r.inverse) for r in facts), max(1 / min(r.inverse) for r in facts)],
            "noise": fmean(fmean(r.lacking) / r.energy if r.energy else 0.0 for r in facts),
        },
        "left": {
            "mean": seen.bounds["sharper"].left,
            "start": seen.start_gradient,
            "by_round": {
                str(r.number): {"trained": r.facts.gradient, "whole": r.gradient, "F": r.value, "gamma": r.gamma}
                for r in seen.case.rounds
            },
        },
        "bias": {
            "mean": fmean(r.bias for r in facts),
            "lasting": seen.lasting,
            "sampled": fmean(r.spread for r in facts),
        },
        "bounds": bounds,
        "lemmas": _lemmas(seen),
        "last": _last(seen),
        "notes": _notes(seen),
    }  # fmt: skip


def _bound(key: str, bound: Bound, seen: Seen) -> dict[str, Any]:
    constants = [seen.constants[name].kind for name in USED.get(key, USUAL)]
    proved = seen.complete and "estimate" not in constants
    return {
        "name": bound.name,
        "value": bound.value,
        "terms": bound.terms,
        "left": bound.left,
        "ratio": bound.left / bound.value if bound.value else None,
        "conditions": [
            {"name": c.name, "allowed": c.allowed, "actual": c.actual, "violated": max(1.0, c.factor), "holds": c.holds}
            for c in bound.conditions
        ],
        "outside": list(bound.outside),
        "vacuous": bound.value >= seen.start_gradient,
        "applies": bound.applies,
        "genuine": bound.applies and proved,
    }


def _lemmas(seen: Seen) -> dict[str, Any]:
    """Measured over bound: the split of Lemma 1 (to rounding), its drift, Lemma 2 and Lemma 3."""
    known = seen.case.known
    rounds = seen.case.rounds
    paths = [(r.facts.lr, path) for r in rounds for path in r.paths]
    drift = [path.walked / limit for lr, path in paths if (limit := lr**2 * known.gradient * path.steps.drift)]
    second = [sum(gap(known, r.facts, smoothness=known.smoothness, gradient=known.gradient)) for r in rounds]
    third = [known.variance * _counted(r) * squared_inverse(r.facts) for r in rounds]
    return {
        "split_error": max(path.split_error for _, path in paths),
        "drift": max(drift, default=None),
        "gap": _ratio([r.gap for r in rounds], second),
        "noise": _ratio([r.noise for r in rounds], third),
    }


def _counted(r: Replayed) -> float:
    """The sum of c_j^2 over the squared sum of c_j, over the steps that were looked at; the largest of any client."""
    return max(sum(c * c for c in path.looked) / sum(path.looked) ** 2 for path in r.paths)


def _ratio(measured: list[float], limit: list[float]) -> float | None:
    return sum(measured) / sum(limit) if sum(limit) else None


def _last(seen: Seen) -> dict[str, Any]:
    """The newest model; with a known optimum also how far it is, and how far it may be."""
    found: dict[str, Any] = {"round": seen.last.round, "F": seen.last.value, "gradient": seen.last.gradient}
    if seen.convex and seen.convex.optimum:
        decay, theorem = seen.case.experiment.weight_decay, seen.bounds["reshuffled"]
        found |= {
            "F_optimum": seen.convex.least,
            "above": seen.last.value - seen.convex.least,
            "above_at_most": seen.last.gradient / (2 * decay),
            "distance": seen.last.distance,
            "best_round_above_at_most": theorem.value / (2 * decay) if theorem.applies else None,
        }
    return found


def _notes(seen: Seen) -> list[str]:
    counted = seen.case.known.rounds
    notes = []
    if not seen.complete:
        notes.append(f"means over {len(seen.case.rounds)} of {counted} rounds: keep all of them for exact ones")
    if counted < seen.done:
        notes.append(
            f"in {seen.done - counted} of {seen.done} rounds nobody trained: the theorems are about the others"
        )
    if not seen.convex:
        notes.append("L is a lower estimate along the trajectory; a network with ReLU has no such constant")
    notes.append("all bounds but Theorem R hold in expectation over batches (and cohorts); a run is one draw")
    return notes
