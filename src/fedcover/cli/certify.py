"""The command that compares a run with the theory: certify."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.options import Data, Device, Json, app
from fedcover.cli.trust import Trust, is_trusted
from fedcover.theory.certificate import certify as certify_run

LEMMAS = {
    "split_error": "Lemma 1, error of the split",
    "drift": "Lemma 1, drift",
    "gap": "Lemma 2",
    "noise": "Lemma 3",
}


@app.command
def certify(
    run: Annotated[Path, Parameter(help="A run folder with stored rounds (keep_rounds).")],
    *,
    steps: Annotated[
        int, Parameter(help="Local steps per client at which the gradient is measured.")
    ] = 5,
    clients: Annotated[
        int, Parameter(help="Largest number of clients used for the full gradient.")
    ] = 200,
    device: Device = "cpu",
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Compare the convergence theorems with a run's measured gradients.

    Show the constants, each bound term by term, and the assumptions that do not hold.
    """
    certificate = certify_run(
        run,
        steps=steps,
        clients=clients,
        device=device,
        data=data,
        tell=console.notify,
        trust=is_trusted(run, trust),
    )
    if json:
        return console.show_json(certificate)
    return _show(certificate)


def _show(certificate: dict[str, Any]) -> None:
    bounds = list(certificate["bounds"].values())
    _show_heading(certificate)
    rows = [
        [name, constant["value"], constant["kind"], constant["how"]]
        for name, constant in certificate["constants"].items()
    ]
    console.table("constants", ["name", "value", "kind", "how"], rows)
    _show_measurements(certificate)
    columns = ["theorem", "bound", "measured / bound", "", "terms"]
    console.table("bounds", columns, [_bound_row(bound) for bound in bounds])
    for bound in bounds:
        _show_violations(bound)
    ratios = [[LEMMAS[name], ratio] for name, ratio in certificate["lemmas"].items()]
    console.table("lemmas, measured / bound", ["lemma", "ratio"], ratios)
    if "above" in certificate["last"]:
        _show_last_round(certificate["last"])
    for note in certificate["notes"]:
        print(f"note: {note}")
    print(f"conclusion: {conclusions.of_certificate(certificate)}")


def _show_heading(certificate: dict[str, Any]) -> None:
    kind = "certificate" if certificate["kind"] == "certificate" else "estimate, no proof"
    if all(_is_void(bound) for bound in certificate["bounds"].values()):
        kind += " (vacuous)"
    replayed, rounds = len(certificate["replayed"]), certificate["rounds"]
    print(f"{certificate['run']}: {kind}; {replayed} of {rounds} rounds replayed")


def _is_void(bound: dict[str, Any]) -> bool:
    """Check whether a bound does not hold, or is no better than what was known at the start."""
    return not bound["applies"] or bool(bound["vacuous"])


def _show_measurements(certificate: dict[str, Any]) -> None:
    coverage, bias, gradient = certificate["coverage"], certificate["bias"], certificate["left"]
    least, most = coverage["gamma_client"]
    print(
        f"coverage: {coverage['gamma']} over all parameters, {coverage['gamma_union']} over those"
        f" ever trained ({coverage['never_trained']:,} never are); per client {least:.4g} to"
        f" {most:.4g}; noise {coverage['noise']:.4g}"
    )
    print(
        f"squared bias of the holders' data: {bias['mean']:.4g}, lasting part"
        f" {bias['lasting']:.4g}; of a random cohort: {bias['sampled']:.4g}"
    )
    print(
        f"measured: mean squared gradient {gradient['mean']:.4g}"
        f" (at the first model {gradient['start']:.4g})"
    )


def _bound_row(bound: dict[str, Any]) -> list[object]:
    remarks = ["vacuous"] if bound["vacuous"] else []
    if not bound["applies"]:
        remarks.append("outside the assumptions")
    else:
        remarks.append("holds" if bound["genuine"] else "would hold")
    terms = "  ".join(f"{name} {value:.3g}" for name, value in bound["terms"].items())
    return [bound["name"], bound["value"], bound["ratio"], ", ".join(remarks), terms]


def _show_violations(bound: dict[str, Any]) -> None:
    violations = [
        f"{condition['name']} exceeded by a factor of {condition['violated']:.3g}"
        for condition in bound["conditions"]
        if not condition["holds"]
    ]
    violations += bound["outside"]
    if violations:
        print(f"{bound['name']}: {'; '.join(violations)}")


def _show_last_round(last: dict[str, Any]) -> None:
    sentence = (
        f"after {last['round']} rounds F is {last['above']:.4g} above its optimum"
        f" {last['F_optimum']:.6g} (at most {last['above_at_most']:.4g} by the gradient)"
    )
    best_round = last["best_round_above_at_most"]
    if best_round is not None:
        sentence += f"; by Theorem R the best round is at most {best_round:.4g} above"
    print(sentence)
