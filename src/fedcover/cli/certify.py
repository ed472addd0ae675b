"""The command that compares a run with the theory: certify."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.cli import conclusions, console
from fedcover.cli.options import Data, Device, Json, app
from fedcover.cli.trust import Trust, is_trusted
from fedcover.theory.certificate import certify as certify_run


@app.command
def certify(
    run: Annotated[Path, Parameter(help="A run folder that keeps some rounds (keep_rounds).")],
    *,
    steps: Annotated[
        int, Parameter(help="Local steps of every client at which its path is looked at.")
    ] = 5,
    clients: Annotated[
        int, Parameter(help="At most so many clients make up the full gradient.")
    ] = 200,
    device: Device = "cpu",
    data: Data = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """The convergence theorems against a run's measured gradients: constants, bounds term by term, what fails."""
    found = certify_run(
        run,
        steps=steps,
        clients=clients,
        device=device,
        data=data,
        tell=console.notify,
        trust=is_trusted(run, trust),
    )
    if json:
        return console.show_json(found)
    _show(found)
    return None


def _show(found: dict[str, Any]) -> None:
    word = "certificate" if found["kind"] == "certificate" else "estimate, no proof"
    word += "" if any(_promises(bound) for bound in found["bounds"].values()) else " (vacuous)"
    print(f"{found['run']}: {word}; {len(found['replayed'])} of {found['rounds']} rounds replayed")
    constants = [
        [name, known["value"], known["kind"], known["how"]]
        for name, known in found["constants"].items()
    ]
    console.table("constants", ["name", "value", "kind", "how"], constants)
    covered, left, bias = found["coverage"], found["left"], found["bias"]
    least, most = covered["gamma_client"]
    print(
        f"coverage {covered['gamma']} of all parameters, {covered['gamma_union']} of those ever trained "
        f"({covered['never_trained']:,} never are); clients' own {least:.4g} to {most:.4g}; "
        f"noise {covered['noise']:.4g}\n"
        f"squared bias of the holders' data: {bias['mean']:.4g}, of which lasting {bias['lasting']:.4g}; "
        f"a random cohort would have {bias['sampled']:.4g}\n"
        f"measured: mean squared gradient {left['mean']:.4g} (at the first model {left['start']:.4g})"
    )
    rows = []
    for bound in found["bounds"].values():
        words = ["vacuous"] if bound["vacuous"] else []
        words += (
            ["outside the assumptions"]
            if not bound["applies"]
            else ["holds" if bound["genuine"] else "would hold"]
        )
        terms = "  ".join(f"{name} {value:.3g}" for name, value in bound["terms"].items())
        rows.append([bound["name"], bound["value"], bound["ratio"], ", ".join(words), terms])
    console.table("bounds", ["theorem", "bound", "measured / bound", "", "terms"], rows)
    for bound in found["bounds"].values():
        broken = [c for c in bound["conditions"] if not c["holds"]]
        words = [f"{c['name']} exceeded by a factor of {c['violated']:.3g}" for c in broken]
        if words or bound["outside"]:
            print(f"{bound['name']}: " + "; ".join([*words, *bound["outside"]]))
    lemmas = found["lemmas"]
    names = {
        "split_error": "Lemma 1, error of the split",
        "drift": "Lemma 1, drift",
        "gap": "Lemma 2",
        "noise": "Lemma 3",
    }
    console.table(
        "lemmas, measured / bound", ["lemma", "ratio"], [[names[k], v] for k, v in lemmas.items()]
    )
    last = found["last"]
    if "above" in last:
        best = last["best_round_above_at_most"]
        print(
            f"after {last['round']} rounds F is {last['above']:.4g} above its optimum {last['F_optimum']:.6g} (at most "
            f"{last['above_at_most']:.4g}, says the gradient)"
            + ("" if best is None else f"; by Theorem R the best round is at most {best:.4g} above")
        )
    for note in found["notes"]:
        print(f"note: {note}")
    print(f"conclusion: {conclusions.of_certificate(found)}")


def _promises(bound: dict[str, Any]) -> bool:
    """Whether a bound holds and says more than what was known before the first round."""
    return bool(bound["applies"]) and not bound["vacuous"]
