"""The last line of a command: its result in one plain sentence."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def of_run(summary: Mapping[str, Any]) -> str:
    """Return the result of a run.

    >>> print(of_run({"rounds": 30, "accuracy": 0.914, "gamma_min": 2}))
    test accuracy after 30 rounds: 91.4 %; at least 2 clients trained each parameter in every round
    >>> print(of_run({"rounds": 1, "accuracy": None, "gamma_min": 0}))
    not evaluated after 1 round; in at least one round no client trained some of the parameters
    """
    rounds, accuracy, coverage = summary["rounds"], summary["accuracy"], summary["gamma_min"]
    if accuracy is None:
        accuracy_text = f"not evaluated after {_count(rounds, 'round')}"
    else:
        accuracy_text = f"test accuracy after {_count(rounds, 'round')}: {100 * accuracy:.1f} %"
    if coverage:
        clients = _count(coverage, "client")
        coverage_text = f"at least {clients} trained each parameter in every round"
    else:
        coverage_text = "in at least one round no client trained some of the parameters"
    return f"{accuracy_text}; {coverage_text}"


def of_sweep(settings: Mapping[str, Sequence[float | None]]) -> str:
    """Return which setting of a sweep has the best mean accuracy over seeds.

    None stands for a run that diverged or was not evaluated.

    >>> sentence = of_sweep({"lr-0.1": [0.9, 0.92], "lr-1": [0.5, None]})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    highest accuracy: lr-0.1 with 0.9100, the mean of 2 seeds; then lr-1 with 0.5000; 1 of 4
    runs has no accuracy
    >>> of_sweep({"a": [None]})
    'no run has an accuracy: all diverged or were not evaluated'
    """  # the output of doctests
    accuracies = {
        name: [accuracy for accuracy in runs if accuracy is not None]
        for name, runs in settings.items()
    }
    means = {name: fmean(values) for name, values in accuracies.items() if values}
    if not means:
        return "no run has an accuracy: all diverged or were not evaluated"
    best, *others = sorted(means, key=lambda name: -means[name])
    num_seeds = len(accuracies[best])
    seeds = "one seed" if num_seeds == 1 else f"the mean of {num_seeds} seeds"
    sentence = f"highest accuracy: {best} with {means[best]:.4f}, {seeds}"
    if others:
        sentence += f"; then {others[0]} with {means[others[0]]:.4f}"
    num_runs = sum(len(runs) for runs in settings.values())
    num_missing = num_runs - sum(len(values) for values in accuracies.values())
    if num_missing:
        verb = "has" if num_missing == 1 else "have"
        sentence += f"; {num_missing} of {_count(num_runs, 'run')} {verb} no accuracy"
    return sentence


def of_cells(rows: Sequence[Mapping[str, Any]], smoke: bool) -> str:
    """Return how far a reproduction is, and how it compares with the paper's claims.

    A smoke run says nothing about the paper.

    >>> sentence = of_cells([{"runs": 1, "wanted": 1, "claimed": None, "last": 40.0}], smoke=True)
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    a smoke run: 1 of 1 cell ran through with digits and a small model; its accuracy says
    nothing about the paper
    >>> missing = {"runs": 0, "wanted": 3, "claimed": 80.0, "last": None}
    >>> of_cells([{"runs": 3, "wanted": 3, "claimed": 90.0, "last": 91.5}, missing], smoke=False)
    '1 of 2 cells has all its runs; accuracy is 1.5 points above what the paper claims (1 cell)'
    """  # the output of doctests
    num_complete = sum(row["runs"] >= row["wanted"] for row in rows)
    cells = f"{num_complete} of {_count(len(rows), 'cell')}"
    if smoke:
        return (
            f"a smoke run: {cells} ran through with digits and a small model;"
            " its accuracy says nothing about the paper"
        )
    sentence = f"{cells} {'has all its' if num_complete == 1 else 'have all their'} runs"
    differences = [
        row["last"] - row["claimed"]
        for row in rows
        if row["claimed"] is not None and row["last"] is not None
    ]
    if not differences:
        return f"{sentence}; none of them can be compared with a claim of the paper yet"
    if len(differences) == 1:
        return f"{sentence}; accuracy is {_points(differences[0])} what the paper claims (1 cell)"
    mean = f"on average {_points(fmean(differences))} what the paper claims"
    span = f"from {min(differences):+.1f} to {max(differences):+.1f}"
    return f"{sentence}; accuracy is {mean}, {span} ({len(differences)} cells)"


def _points(difference: float) -> str:
    return f"{abs(difference):.1f} points {'above' if difference >= 0 else 'below'}"


def of_certificate(certificate: Mapping[str, Any]) -> str:
    """Return what the theorems prove about a run, if anything.

    >>> bound = {
    ...     "name": "Theorem 1", "applies": True, "genuine": True, "vacuous": False, "value": 0.5
    ... }
    >>> estimated = {**bound, "genuine": False}
    >>> inapplicable, vacuous = {**bound, "applies": False}, {**bound, "vacuous": True}
    >>> left = {"mean": 0.1, "start": 2.0}
    >>> sentence = of_certificate({"bounds": {"a": bound}, "left": left})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    Theorem 1 holds for this run and proves a mean squared gradient of at most 0.5; 0.1 was
    measured
    >>> sentence = of_certificate({"bounds": {"a": estimated}, "left": left})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    no proof, as constants are estimated: Theorem 1 would bound the mean squared gradient by
    0.5; 0.1 was measured
    >>> sentence = of_certificate({"bounds": {"a": inapplicable, "b": vacuous}, "left": left})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    no theorem says anything about this run; outside of its assumptions: 1 of 2; no better than
    the first model: 1
    """  # the output of doctests
    bounds = list(certificate["bounds"].values())
    measured = certificate["left"]["mean"]
    informative = [bound for bound in bounds if bound["applies"] and not bound["vacuous"]]
    informative.sort(key=lambda bound: bound["value"])
    proved = [bound for bound in informative if bound["genuine"]]
    if proved:
        tightest = proved[0]
        return (
            f"{tightest['name']} holds for this run and proves a mean squared gradient of at most"
            f" {tightest['value']:.4g}; {measured:.4g} was measured"
        )
    if informative:
        tightest = informative[0]
        return (
            f"no proof, as constants are estimated: {tightest['name']} would bound the mean"
            f" squared gradient by {tightest['value']:.4g}; {measured:.4g} was measured"
        )
    num_inapplicable = sum(not bound["applies"] for bound in bounds)
    return (
        "no theorem says anything about this run; outside of its assumptions:"
        f" {num_inapplicable} of {len(bounds)}; no better than the first model:"
        f" {len(bounds) - num_inapplicable}"
    )


def of_plan(plan: Mapping[str, Any]) -> str:
    """Return what a fleet can cover.

    >>> sentence = of_plan({"chosen": {"gamma": 2}, "assignment": [{}] * 10, "upper_bound": 3})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    with this plan every parameter is trained by at least 2 of 10 devices in a round; no plan
    reaches more than 3
    >>> sentence = of_plan({"chosen": {"gamma": 0}, "assignment": [{}] * 2, "upper_bound": 0})
    >>> print(sentence)  # doctest: +NORMALIZE_WHITESPACE
    with this plan some parameters are trained by no device in a round; no plan reaches more
    than 0
    """  # the output of doctests
    coverage, devices = plan["chosen"]["gamma"], len(plan["assignment"])
    if coverage:
        trained = f"every parameter is trained by at least {coverage} of {devices} devices"
    else:
        trained = "some parameters are trained by no device"
    limit = f"no plan reaches more than {plan['upper_bound']}"
    return f"with this plan {trained} in a round; {limit}"


def of_departures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which departure changes the accuracy most.

    The first row is the algorithm without departures.

    >>> of_departures([{"setting": "faithful", "accuracy": 0.9, "spread": 0.01, "seeds": 3},
    ...                {"setting": "zero", "accuracy": 0.7, "spread": 0.02, "seeds": 3}])
    'zero changes the accuracy most: -20.0 points; the standard deviation over seeds is 1.0'
    """
    faithful, *others = rows
    changes = {
        row["setting"]: 100 * (row["accuracy"] - faithful["accuracy"])
        for row in others
        if row["setting"] != "all"
    }
    largest = max(changes, key=lambda setting: abs(changes[setting]))
    sentence = f"{largest} changes the accuracy most: {changes[largest]:+.1f} points"
    if faithful["seeds"] == 1:
        return f"{sentence}; with one seed this may be chance"
    return f"{sentence}; the standard deviation over seeds is {100 * faithful['spread']:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
