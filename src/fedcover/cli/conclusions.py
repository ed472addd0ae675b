"""What a command has found, in one plain sentence that stands at its end."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def of_run(summary: Mapping[str, Any]) -> str:
    """What a run has come to.

    >>> of_run({"rounds": 30, "accuracy": 0.914, "gamma_min": 2})
    'after 30 rounds 91.4 % of the test set is right; every parameter was trained by at least 2 clients in every round'
    >>> of_run({"rounds": 1, "accuracy": None, "gamma_min": 0})
    'after 1 round nothing was evaluated; in at least one round some parameter was trained by nobody'
    """
    accuracy = summary["accuracy"]
    right = (
        "nothing was evaluated"
        if accuracy is None
        else f"{100 * accuracy:.1f} % of the test set is right"
    )
    return f"after {_many(summary['rounds'], 'round')} {right}; {_covered(summary['gamma_min'])}"


def _covered(gamma: int) -> str:
    if gamma:
        return f"every parameter was trained by at least {_many(gamma, 'client')} in every round"
    return "in at least one round some parameter was trained by nobody"


def of_sweep(settings: Mapping[str, Sequence[float | None]]) -> str:
    """Which setting of a sweep is the best by its mean over seeds; None is a run that diverged or was not evaluated.

    >>> of_sweep({"lr-0.1": [0.9, 0.92], "lr-1": [0.5, None]})
    'highest accuracy: lr-0.1 with 0.9100, the mean of 2 seeds; then lr-1 with 0.5000; 1 of 4 runs has no accuracy'
    >>> of_sweep({"a": [None]})
    'no run has an accuracy: all diverged or were not evaluated'
    """
    known = {name: [run for run in runs if run is not None] for name, runs in settings.items()}
    means = {name: fmean(runs) for name, runs in known.items() if runs}
    if not means:
        return "no run has an accuracy: all diverged or were not evaluated"
    best, *others = sorted(means, key=lambda name: -means[name])
    seeds = "one seed" if len(known[best]) == 1 else f"the mean of {len(known[best])} seeds"
    told = f"highest accuracy: {best} with {means[best]:.4f}, {seeds}"
    if others:
        told += f"; then {others[0]} with {means[others[0]]:.4f}"
    every = [run for runs in settings.values() for run in runs]
    if lost := every.count(None):
        told += (
            f"; {lost} of {_many(len(every), 'run')} {'has' if lost == 1 else 'have'} no accuracy"
        )
    return told


def of_cells(rows: Sequence[Mapping[str, Any]], smoke: bool) -> str:
    """How far a reproduction is, and how it compares with what is claimed; a smoke run says nothing about that.

    >>> of_cells([{"runs": 1, "wanted": 1, "claimed": None, "last": 40.0}], smoke=True)
    'a smoke run: 1 of 1 cell ran through with digits and a small model; its accuracy says nothing about the paper'
    >>> missing = {"runs": 0, "wanted": 3, "claimed": 80.0, "last": None}
    >>> of_cells([{"runs": 3, "wanted": 3, "claimed": 90.0, "last": 91.5}, missing], smoke=False)
    '1 of 2 cells has all its runs; accuracy is 1.5 points above what the paper claims (1 cell)'
    """
    whole = sum(row["runs"] >= row["wanted"] for row in rows)
    cells = _many(len(rows), "cell")
    if smoke:
        many = f"{whole} of {cells} ran through with digits and a small model"
        return f"a smoke run: {many}; its accuracy says nothing about the paper"
    apart = [
        row["last"] - row["claimed"]
        for row in rows
        if row["claimed"] is not None and row["last"] is not None
    ]
    told = f"{whole} of {cells} {'has' if whole == 1 else 'have'} all {'its' if whole == 1 else 'their'} runs"
    if not apart:
        return f"{told}; there is no accuracy yet beside one that the paper claims"
    if len(apart) == 1:
        return f"{told}; accuracy is {_points(apart[0])} what the paper claims (1 cell)"
    mean = f"on average {_points(fmean(apart))} what the paper claims"
    return f"{told}; accuracy is {mean}, from {min(apart):+.1f} to {max(apart):+.1f} ({len(apart)} cells)"


def _points(apart: float) -> str:
    return f"{abs(apart):.1f} points {'above' if apart >= 0 else 'below'}"


def of_certificate(found: Mapping[str, Any]) -> str:
    """What the theorems say about a run, if anything.

    >>> bound = {"name": "Theorem 1", "applies": True, "genuine": True, "vacuous": False, "value": 0.5}
    >>> left = {"mean": 0.1, "start": 2.0}
    >>> of_certificate({"bounds": {"a": bound}, "left": left})
    'Theorem 1 holds for this run and proves a mean squared gradient of at most 0.5; 0.1 was measured'
    >>> of_certificate({"bounds": {"a": {**bound, "genuine": False}}, "left": left})
    'no proof, as constants are estimated: Theorem 1 would bound the mean squared gradient by 0.5; 0.1 was measured'
    >>> of_certificate({"bounds": {"a": {**bound, "applies": False}, "b": {**bound, "vacuous": True}}, "left": left})
    'no theorem tells anything about this run; outside of its assumptions: 1 of 2; no better than the first model: 1'
    """
    bounds, measured = list(found["bounds"].values()), found["left"]["mean"]
    telling = sorted(
        (b for b in bounds if b["applies"] and not b["vacuous"]), key=lambda b: b["value"]
    )
    if proved := [bound for bound in telling if bound["genuine"]]:
        name, value = proved[0]["name"], proved[0]["value"]
        return (
            f"{name} holds for this run and proves a mean squared gradient of at most {value:.4g}; "
            f"{measured:.4g} was measured"
        )
    if telling:
        name, value = telling[0]["name"], telling[0]["value"]
        return (
            f"no proof, as constants are estimated: {name} would bound the mean squared gradient by {value:.4g}; "
            f"{measured:.4g} was measured"
        )
    outside = sum(not bound["applies"] for bound in bounds)
    return (
        f"no theorem tells anything about this run; outside of its assumptions: {outside} of {len(bounds)}; "
        f"no better than the first model: {len(bounds) - outside}"
    )


def of_plan(found: Mapping[str, Any]) -> str:
    """What a fleet can cover.

    >>> of_plan({"chosen": {"gamma": 2}, "assignment": [{}] * 10, "upper_bound": 3})
    'with this plan every parameter is trained by at least 2 of 10 devices in a round; no plan reaches more than 3'
    >>> of_plan({"chosen": {"gamma": 0}, "assignment": [{}] * 2, "upper_bound": 0})
    'this plan leaves some parameter to nobody in a round; no plan reaches more than 0'
    """
    gamma, devices = found["chosen"]["gamma"], len(found["assignment"])
    most = f"no plan reaches more than {found['upper_bound']}"
    if not gamma:
        return f"this plan leaves some parameter to nobody in a round; {most}"
    return f"with this plan every parameter is trained by at least {gamma} of {devices} devices in a round; {most}"


def of_departures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which departure from the faithful algorithm, which comes first, changes the accuracy most.

    >>> of_departures([{"setting": "faithful", "accuracy": 0.9, "spread": 0.01, "seeds": 3},
    ...                {"setting": "zero", "accuracy": 0.7, "spread": 0.02, "seeds": 3}])
    'zero changes the accuracy most: -20.0 points; seeds alone make a standard deviation of 1.0'
    """
    faithful, *others = rows
    single = [row for row in others if row["setting"] != "all"]
    most = max(single, key=lambda row: abs(row["accuracy"] - faithful["accuracy"]))
    change = 100 * (most["accuracy"] - faithful["accuracy"])
    told = f"{most['setting']} changes the accuracy most: {change:+.1f} points"
    if faithful["seeds"] == 1:
        return f"{told}; one seed does not tell how much of that is chance"
    return f"{told}; seeds alone make a standard deviation of {100 * faithful['spread']:.1f}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
