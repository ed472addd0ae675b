"""Data of your own: tensors, and if you like who owns each row.

Run it from the root of the repository: python -m examples.your_data
"""

import torch

import fedcover as fc


def rings(samples: int = 2000, owners: int = 20) -> fc.Dataset:
    """Points on two rings: which ring is the label; every owner sees another part of the plane."""
    draw = torch.Generator().manual_seed(0)
    angle = torch.rand(samples, generator=draw) * 2 * torch.pi
    y = torch.randint(2, (samples,), generator=draw)
    radius = 1 + y + 0.2 * torch.randn(samples, generator=draw)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    owner = (angle / (2 * torch.pi) * owners).long().clamp(max=owners - 1)
    test = samples // 5
    return fc.from_tensors(
        (x[test:], y[test:]), (x[:test], y[:test]), owner=owner[test:], name="rings"
    )


if __name__ == "__main__":
    experiment = fc.Experiment(
        dataset="examples.your_data:rings",
        partition="owner",
        clients=20,
        fleet="1x1.0 + 1x0.5",
        policy="rolling",
        rounds=10,
        lr=0.05,
    )
    print(f"accuracy {fc.run(experiment).accuracy:.3f}")
    # a data set made on the spot need not be importable: fc.run(experiment, dataset=rings())
