"""Certify convergence: softmax regression with l2 on devices that hold only a part of it.

The constants are proved, the optimum is known and all rounds are kept. So fedcover proves how near
to the optimum the model must come. Run it from the root of the repository:

    python -m examples.certificate
"""

import tempfile
from typing import Any

import fedcover as fc

ROUNDS = 20
FLEETS = {
    "every parameter is covered": {"fleet": "4x1.0 + 6x0.75", "policy": "magnitude"},
    "half of the parameters never are": {"fleet": "10x0.5", "policy": "prefix"},
}
common: dict[str, Any] = {
    "dataset": "digits",
    "model": "softmax",
    "clients": 10,
    "active": 10,
    "rounds": ROUNDS,
    "epochs": 1,
    "batch_size": 1000,
    "lr": 0.05,
    "momentum": 0.0,
    "weight_decay": 2.0,
    "keep_rounds": range(ROUNDS),
    "checkpoint_every": ROUNDS,
}

for name, fields in FLEETS.items():
    with tempfile.TemporaryDirectory() as folder:
        run = fc.run(fc.Experiment(**common, **fields), folder)
        certificate = fc.certify(folder)
    bound, last = certificate["bounds"]["reshuffled"], certificate["last"]
    accuracy = run.summary["accuracy_common"]  # what nobody trains is struck from the model
    print(
        f"{name}: {certificate['kind']}, coverage {certificate['coverage']['gamma']}, "
        f"accuracy {accuracy:.3f}"
    )
    print(f"  mean squared gradient {bound['left']:.3g}; Theorem R: at most {bound['value']:.3g}")
    print(
        "  best round: loss above the optimum at most "
        f"{last['best_round_above_at_most']:.3g} by Theorem R"
    )
    print(
        f"  last round: {last['above']:.2g}; at most "
        f"{last['above_at_most']:.2g} by its measured gradient"
    )
