"""What a run's kept rounds say about the theorems' constants, and both sides of every bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedcover.errors import RunError
from fedcover.runs import checkpoints
from fedcover.runs.run_folder import Folder
from fedcover.server.cohort import cohort_of
from fedcover.server.round import initial_state
from fedcover.server.round_setup import Setup
from fedcover.theory import BOUNDS, Bound, Constants, LocalSteps
from fedcover.theory.certificate.assumptions import ReplayedRun, violated_assumptions
from fedcover.theory.certificate.global_loss import GlobalLoss, build_global_loss, squared_norm
from fedcover.theory.certificate.replay import ReplayedRound, replay_round, zero_untrained
from fedcover.theory.certificate.softmax_case import SoftmaxSolution, is_softmax, solve_softmax
from fedcover.types import Params

LogFn = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    """A constant, where it comes from, and whether it is proved, exact for this run, or estimated."""

    value: float
    kind: str
    how: str


@dataclass(frozen=True)
class Measurements:
    """All that was measured of a run, and the constants that follow from it."""

    run: ReplayedRun
    constants: dict[str, Estimate]
    bounds: dict[str, Bound]
    trained: Mapping[str, Tensor]
    rounds_done: int
    start_gradient: float
    persistent_bias: float
    """The squared length of the rounds' mean bias: what does not average out."""
    last: "LastModel"
    convex: SoftmaxSolution | None

    @property
    def complete(self) -> bool:
        """Whether every round in which somebody trained was kept, so that means are over all of them."""
        return len(self.run.rounds) == self.run.constants.rounds


@dataclass(frozen=True)
class LastModel:
    """The newest model: its F, its squared gradient and its distance from the optimum, if that is known."""

    round: int
    value: float
    gradient: float
    distance: float | None


def _check_same_cohort(setup: Setup, line: Mapping[str, Any], round: int) -> None:
    """Refuse a round of a fleet whose devices came, left, or held something else than its experiment says."""
    asked = {str(client.id): client.capacity for client in cohort_of(setup, round)}
    told = {client: figures["capacity"] for client, figures in line.get("clients", {}).items()}
    missing = asked.keys() - told.keys() - set(map(str, line.get("dropped", ())))
    if line and (
        missing or any(asked.get(client) != capacity for client, capacity in told.items())
    ):
        raise RunError(
            f"round {round + 1} cannot be replayed: nodes were missing or had other capacities than the experiment's "
            "fleet, so other clients took part than it draws"
        )


def measure_run(
    found: Folder, setup: Setup, num_probes: int, clients: int, device: str, tell: LogFn
) -> Measurements:
    """Replay the kept rounds; every client's path is looked at in so many steps, F over so many clients."""
    digest = found.experiment.digest
    newest, _ = checkpoints.load_newest(found.checkpoints, digest, device)
    kept = _kept(found, newest.round)
    trained = newest.coverage.ever
    global_loss = build_global_loss(setup, clients)
    first = zero_untrained(initial_state(setup).params, trained)
    tell(f"F at the first model, over {len(global_loss.client_weights)} of {setup.clients} clients")
    start = global_loss.evaluate(first)
    rounds: list[ReplayedRound] = []
    persistent_bias = {
        name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in first.items()
    }
    lines = {line["round"]: line for line in found.metrics(newest.round)}
    dropped = {round: line.get("dropped", ()) for round, line in lines.items()}
    for place, file in enumerate(kept):
        tell(f"replaying round {file.round} ({place + 1} of {len(kept)})")
        state = checkpoints.load_checkpoint(file, digest, device)
        _check_same_cohort(setup, lines.get(file.round, {}), file.round)
        again = replay_round(
            setup, state, global_loss, trained, num_probes, dropped.get(file.round, ())
        )
        if again:
            for name, tensor in again.bias.items():
                persistent_bias[name] += tensor
            rounds.append(replace(again, bias={}))  # of many rounds, one vector is enough
    if not rounds:
        raise RunError(
            f"in the kept rounds of {found.path} no client answered, so there is nothing to certify"
        )
    convex = None
    if is_softmax(setup.task.model.module) and len(global_loss.client_weights) == setup.clients:
        tell("the optimum")
        convex = solve_softmax(found.experiment, global_loss, first, trained)
    tell("the Hessian's largest eigenvalue")
    curvature = global_loss.curvature(zero_untrained(newest.params, trained), found.experiment.seed)
    counted = _counted_rounds(found, kept, rounds, newest.round)
    known = _constants(
        setup, rounds, start.value, curvature, len(rounds) == len(counted), global_loss, convex
    )
    constants = _to_constants(known, setup, rounds, counted)
    case = ReplayedRun(found.experiment, setup, constants, rounds, _precisions(found))
    quantities = [r.quantities for r in rounds]
    bounds = {
        name: replace(
            made(constants, quantities), violated_assumptions=violated_assumptions(name, case)
        )
        for name, made in BOUNDS.items()
    }
    return Measurements(
        case, known, bounds, trained, newest.round, squared_norm(start.gradient, trained),
        squared_norm(persistent_bias) / len(rounds) ** 2,
        _last(global_loss, newest.round, newest.params, trained, convex), convex,
    )  # fmt: skip


def _kept(found: Folder, before: int) -> list[checkpoints.CheckpointFile]:
    """The kept states from which a round was trained, in order."""
    kept = sorted(
        (file for file in checkpoints.list_checkpoints(found.kept) if file.round < before),
        key=lambda file: file.round,
    )
    if kept:
        return kept
    every = list(range(0, found.experiment.rounds, max(1, found.experiment.rounds // 10)))
    raise RunError(
        f"{found.path} keeps no round that could be replayed; run it again with keep_rounds, such as --set "
        f"'keep_rounds={every}' (all rounds, if the certificate is to be exact)"
    )


def _counted_rounds(
    found: Folder,
    kept: Sequence[checkpoints.CheckpointFile],
    rounds: Sequence[ReplayedRound],
    rounds_done: int,
) -> list[int]:
    """The rounds of the theorems: those in which somebody trained. Of rounds that were not kept, the run's lines tell.

    A round without any update leaves the model as it is, so F falls in the others alone.
    """
    empty = {
        line["round"] for line in found.metrics(rounds_done) if line.get("train_loss", 0.0) is None
    }
    not_kept = set(range(rounds_done)) - {file.round for file in kept}
    return sorted({r.number for r in rounds} | (not_kept - empty))


def _precisions(found: Folder) -> tuple[str, ...]:
    """In which precisions the run was computed: whoever went on with it may have changed it."""
    said = [found.manifest, *(found.manifest.get("resumed") or [])]
    return tuple(dict.fromkeys(entry["precision"] for entry in said if "precision" in entry))


def _last(
    global_loss: GlobalLoss,
    round: int,
    newest: Params,
    trained: Mapping[str, Tensor],
    convex: SoftmaxSolution | None,
) -> LastModel:
    params = zero_untrained(newest, trained)
    full = global_loss.evaluate(params)
    away = None
    if convex and convex.optimum:
        away = (
            squared_norm(
                {name: params[name].double() - best for name, best in convex.optimum.items()}
            )
            ** 0.5
        )
    return LastModel(round, full.value, squared_norm(full.gradient, trained), away)


def _constants(
    setup: Setup, rounds: Sequence[ReplayedRound], start: float, curvature: float, all_rounds: bool,
    global_loss: GlobalLoss, convex: SoftmaxSolution | None,
) -> dict[str, Estimate]:  # fmt: skip
    paths = [path for r in rounds for path in r.paths]
    everybody = len(global_loss.client_weights) == setup.clients
    every_step = all(len(path.probe_weights) == path.steps.count for path in paths)
    secant = max(path.secant for path in paths)
    along = max(r.curvature for r in rounds)
    exact = "exact" if all_rounds else "estimate"
    near = "exact" if all_rounds and every_step else "estimate"
    made = {
        "L": Estimate(
            max(secant, along, curvature), "estimate",
            f"largest of secants on clients' paths {secant:.4g}, F along its way {along:.4g}, Hessian {curvature:.4g}",
        ),
        "L_batch": Estimate(max(path.batch_secant for path in paths), near, "secants of batches on clients' paths"),
        "G": Estimate(max(path.gradient for path in paths), "estimate", "mean over a client's batches, largest seen"),
        "G_step": Estimate(max(path.step_gradient for path in paths), exact, "largest squared step gradient"),
        "sigma2": Estimate(max(path.variance for path in paths), "estimate", "batches around their client; largest"),
        "zeta2": Estimate(
            max(r.dissimilarity for r in rounds), "exact" if all_rounds and everybody else "estimate",
            f"{len(global_loss.client_weights)} of {setup.clients} clients around their mean, largest seen",
        ),
        "F_0": Estimate(start, "exact" if everybody else "estimate", "at the first model"),
        "F_least": Estimate(0.0, "proved", "cross-entropy is never negative"),
    }  # fmt: skip
    if convex:
        made |= _proved_constants(convex, made)
    return made


def _proved_constants(convex: SoftmaxSolution, seen: dict[str, Estimate]) -> dict[str, Estimate]:
    """What is proved takes the place of what was estimated; what is exact and smaller stays."""
    convex_constants = convex.convex_constants
    made = {
        "L": Estimate(
            convex_constants.smoothness,
            "proved",
            "decay + half the largest eigenvalue of a client's second moments",
        ),
        "L_batch": Estimate(
            convex_constants.batch_smoothness,
            "proved",
            "the same for batches: decay + half the largest squared length",
        ),
        "sigma2": Estimate(
            convex_constants.variance,
            "proved",
            "2 max|x|^2 / batch size; 0 if a batch is everything",
        ),
        "F_least": Estimate(
            convex.least, "proved", "loss at the optimum less |gradient|^2/(2 decay) there"
        ),
    }
    limits = {
        "G": convex_constants.gradient,
        "G_step": convex_constants.gradient,
        "zeta2": convex_constants.dissimilarity,
    }
    for name, limit in limits.items():
        known = seen[name]
        if known.kind != "exact" and limit < float("inf"):
            made[name] = Estimate(limit, "proved", "from the lengths of the inputs")
    if (
        "G" in made and seen["G_step"].kind == "exact"
    ):  # a mean over batches is at most the largest of them
        made["G"] = (
            made["G"]
            if convex_constants.variance
            else Estimate(seen["G_step"].value, "exact", seen["G_step"].how)
        )
    return made


def _to_constants(
    known: dict[str, Estimate],
    setup: Setup,
    rounds: Sequence[ReplayedRound],
    counted: Sequence[int],
) -> Constants:
    count = max(path.steps.count for r in rounds for path in r.paths)
    return Constants(
        smoothness=known["L"].value, batch_smoothness=known["L_batch"].value, gradient=known["G"].value,
        step_gradient=known["G_step"].value, variance=known["sigma2"].value, start=known["F_0"].value,
        least=known["F_least"].value, steps=LocalSteps(count, setup.task.local.momentum), rounds=len(counted),
        lr_sum=sum(setup.lr(round) for round in counted),
    )  # fmt: skip
