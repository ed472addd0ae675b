"""A policy of your own: one function of one client.

Run it from the root of the repository: python -m examples.your_policy
"""

import torch

import fedcover as fc
from fedcover.submodels.unit_groups import num_units_kept


@fc.per_client
def alternating(view: fc.View, client: fc.Client) -> fc.Slices:
    """Odd clients train the first units of every group, even clients the last ones."""
    start = {}
    for group in view.groups:
        num_units = num_units_kept(group.size, client.capacity)
        start[group.name] = 0 if client.id % 2 else group.size - num_units
    return fc.window_slices(view.groups, client.capacity, start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    experiment = fc.Experiment(fleet="1x0.75 + 1x0.5", clients=20, rounds=10, policy="prefix")
    for name, policy in {"prefix": None, "alternating": alternating}.items():
        run = fc.run(experiment, policy=policy)
        print(f"{name:12} accuracy {run.accuracy:.3f}  coverage {run.gamma_min}")
    # the same from a TOML file: policy = "examples.your_policy:alternating"
