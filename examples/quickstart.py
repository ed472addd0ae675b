"""Ten lines: one model over a fleet in which only some devices hold all of it.

Run it from the root of the repository: python -m examples.quickstart
"""

import fedcover as fc

experiment = fc.Experiment(
    dataset="digits",
    model="mlp(hidden=[64])",
    fleet="4x1.0 + 6x0.5",
    policy="rolling",
    clients=20,
    rounds=20,
)
run = fc.run(experiment)
print(
    f"accuracy {run.accuracy:.3f}; every weight was trained by at least "
    f"{run.gamma_min} clients in every round"
)
print(run.submodel(0.5))  # an ordinary module, ready for a device that holds half of the width
