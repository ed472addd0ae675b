"""The cells of plans/coverage_comparison.md as data: what is run, with which settings, in which
order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fedcover.analysis.plan_report import fleet_view
from fedcover.policies import POLICIES
from fedcover.policies.planned import plan_problem
from fedcover.runs.experiment import Experiment

SEEDS = (0, 1, 2, 3, 4)
TUNING_SEED = 100
RATES = (0.01, 0.03, 0.1)
FLEETS = {
    "low": "6x1.0 + 4x0.75",
    "medium": "4x1.0 + 6x0.75",
    "high": "1x1.0 + 3x0.75 + 6x0.5",
    "halves": "4x0.5 + 6x0.25",
    "mixed": "5x0.75 + 5x0.5",
}
SPLITS = {"iid": "iid", "labels2": "labels(limit=2)"}
SHARED: dict[str, Any] = {
    "active": 10,
    "assignment": "slot",
    "momentum": 0.5,
    "validation": 0.1,
    "rounds": 30,
    "epochs": 2,
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "model": "mlp(hidden=[64])", "clients": 20, "batch_size": 10},
    "mnist": {"dataset": "mnist", "model": "mlp(hidden=[200])", "clients": 100, "batch_size": 20},
}
CIFAR: dict[str, Any] = {
    "dataset": "cifar10",
    "model": "wide_resnet(depth=28, widen=2)",
    "clients": 100,
    "batch_size": 10,
    "rounds": 100,
    "epochs": 5,
    "lr": 0.1,
    "fleet": "4x0.5 + 6x0.25",
}
POLICY_OF = {
    "planned": "planned",
    "prefix": "prefix",
    "rolling": "rolling",
    "spread": "rolling(spread=true)",
    "random": "random",
    "magnitude": "magnitude",
    "small": "homogeneous",
}
RIVALS = tuple(POLICY_OF)[1:]
DESIGNS = tuple(product((4, 6, 8), (1.0, 1.8)))
CORNERS = tuple(product((4, 8), (1.0, 1.8)))
WIDTHS = (16, 64, 256)


@dataclass(frozen=True)
class Cell:
    """One setting and policy; its learning rate is fixed, chosen for itself, or that of another
    cell (`rate_of`).
    """

    id: str
    fields: Mapping[str, Any]
    rate_of: str | None = None
    seeds: Sequence[int] = field(default=SEEDS)

    @property
    def measured(self) -> tuple[int, int, int]:
        """After how many rounds the metric is taken."""
        last = int(self.fields["rounds"])
        step = 5 if last > 10 else 1
        return last - 2 * step, last - step, last

    def experiment(self, seed: int, lr: float) -> Experiment:
        """The run of one seed; its states are kept in the rounds after which the metric
        is taken.
        """
        name = f"{self.id.replace('/', '-')}-{lr:g}-{seed}"
        files = {"name": name, "keep_rounds": self.measured, "checkpoint_every": 10}
        return Experiment(**{**self.fields, **files, "seed": seed, "lr": lr})


Wave = list[Cell]
"""Cells that may run at once."""


def grid(
    data: Mapping[str, dict[str, Any]] = DATA, fleets: Mapping[str, str] = FLEETS
) -> Iterator[Wave]:
    """Part 1: policies against each other at equal parameters."""
    wave = []
    for (kind, own), (split, partition), (name, fleet) in product(
        data.items(), SPLITS.items(), fleets.items()
    ):
        fields = {**SHARED, **own, "partition": partition, "fleet": fleet, "capacity": "parameters"}
        wave += [
            Cell(f"grid/{kind}-{split}-{name}-{policy}", changed)
            for policy, changed in _line_up(fields)
        ]
    yield wave


def _line_up(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, policy in POLICY_OF.items():
        yield name, {**fields, "policy": policy}
    yield "planned-most", {**fields, "policy": f"planned(gamma={largest_gamma(fields, 'subnet')})"}
    yield "planned-pruning", {**fields, "policy": "planned(kind='pruning')"}
    most = largest_gamma(fields, "pruning")
    yield "planned-pruning-most", {**fields, "policy": f"planned(kind='pruning', gamma={most})"}
    fleet = Experiment(**fields).scaled_fleet
    mean = sum(n * c for n, c in zip(fleet.counts, fleet.capacities, strict=True)) / sum(
        fleet.counts
    )
    yield "mean", {**fields, "policy": "homogeneous", "fleet": f"10x{mean:.6f}"}


def factorial(data: Mapping[str, dict[str, Any]] = DATA) -> Iterator[Wave]:
    """Part 2: noise x coverage at equal capacity."""
    settings = {
        f"{kind}-{split}": {**SHARED, **own, "partition": partition, "fleet": FLEETS["medium"]}
        for (kind, own), (split, partition) in product(data.items(), SPLITS.items())
    }
    yield [
        Cell(f"factorial/{name}-full", {**fields, "policy": "full"})
        for name, fields in settings.items()
    ]
    yield [
        cell
        for name, fields in settings.items()
        for cell in _designs(f"factorial/{name}", fields, DESIGNS)
    ]


def width(data: Mapping[str, dict[str, Any]] = DATA) -> Iterator[Wave]:
    """Part 3: the corners of the factorial for narrow and wide networks."""
    settings = {
        f"width/{kind}-{units}": {
            **SHARED,
            **own,
            "fleet": FLEETS["medium"],
            "model": f"mlp(hidden=[{units}])",
        }
        for (kind, own), units in product(data.items(), WIDTHS)
    }
    yield [Cell(f"{name}-full", {**fields, "policy": "full"}) for name, fields in settings.items()]
    yield [cell for name, fields in settings.items() for cell in _designs(name, fields, CORNERS)]


def longer(data: Mapping[str, dict[str, Any]] = DATA) -> Iterator[Wave]:
    """Part 4: more rounds, more epochs; learning rates and the short runs are those of part 2."""
    wave: Wave = []
    for (kind, own), (rounds, epochs) in product(data.items(), ((120, 2), (30, 8))):
        fields = {**SHARED, **own, "fleet": FLEETS["medium"], "rounds": rounds, "epochs": epochs}
        rate = f"factorial/{kind}-iid-full"
        name = f"longer/{kind}-{rounds}x{epochs}"
        wave.append(Cell(f"{name}-full", {**fields, "policy": "full"}, rate))
        wave += _designs(name, fields, ((4, 1.8),), rate)
    yield wave


def _designs(
    name: str, fields: dict[str, Any], pairs: Sequence[tuple[int, float]], rate: str | None = None
) -> list[Cell]:
    policy = "benchmarks.coverage.designs:designed"
    return [
        Cell(
            f"{name}-{g}-{noise}",
            {**fields, "policy": f"{policy}(gamma={g}, noise={noise})"},
            rate or f"{name}-full",
        )
        for g, noise in pairs
    ]


def cifar() -> Iterator[Wave]:
    """Part 5: all policies of a seed before the next seed."""
    fields = {**SHARED, **CIFAR}
    line_up = {name: {**fields, "policy": policy} for name, policy in POLICY_OF.items()}
    line_up["magnitude"] |= {"capacity": "parameters", "fleet": _equal_parameters(fields)}
    line_up["planned-most"] = {
        **fields,
        "policy": f"planned(gamma={largest_gamma(fields, 'subnet')})",
    }
    line_up["planned-covered"] = {**fields, "policy": "planned(copies=false)"}
    for seed in SEEDS:
        yield [Cell(f"cifar/{name}", own, seeds=(seed,)) for name, own in line_up.items()]


def largest_gamma(fields: dict[str, Any], kind: str) -> int:
    """The largest coverage of every unit, or weight, that the fleet has room for."""
    groups, _, _ = plan_problem(fleet_view(Experiment(**fields)), kind)
    return min(group.gamma_max for group in groups.values())


def _equal_parameters(fields: dict[str, Any]) -> str:
    """The fleet whose parameter shares are those of its sub-networks."""
    view = fleet_view(Experiment(**fields))
    total = sum(tensor.numel() for tensor in view.params.values())
    parts = POLICIES["prefix"](view)
    shares = [sum(part.sizes(view.params).values()) / total for part in parts if part is not None]
    return " + ".join(
        f"{shares.count(share)}x{share:.9f}" for share in sorted(set(shares), reverse=True)
    )


PARTS = {"grid": grid, "factorial": factorial, "width": width, "longer": longer, "cifar": cifar}


def quick() -> Iterator[Wave]:
    """A few short cells of every kind on digits, to see that all of it works; nothing is concluded
    from them.
    """
    digits = {"digits": DATA["digits"]}
    fleets = {name: FLEETS[name] for name in ("medium", "halves")}
    for part in (grid(digits, fleets), factorial(digits), width(digits), longer(digits)):
        for wave in part:
            yield [
                Cell(
                    c.id,
                    {**c.fields, "rounds": 4 if c.fields["rounds"] == 30 else 6, "epochs": 1},
                    c.rate_of,
                    (0, 1),
                )
                for c in wave
            ]
