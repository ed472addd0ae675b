"""Measurement of a run: the theorems' constants and both sides of every bound."""

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
    """A constant of the theorems.

    `kind` is "proved", "exact" (for this run) or "estimate"; `how` says where the value is from.
    """

    value: float
    kind: str
    how: str


@dataclass(frozen=True)
class Measurements:
    """All measurements of a run, and the constants and bounds that follow from them."""

    run: ReplayedRun
    constants: dict[str, Estimate]
    bounds: dict[str, Bound]
    trained: Mapping[str, Tensor]
    rounds_done: int
    start_gradient: float
    persistent_bias: float
    """The squared length of the mean bias of all rounds: the part that does not average out."""
    last: "LastModel"
    convex: SoftmaxSolution | None

    @property
    def complete(self) -> bool:
        """Whether all rounds in which some client trained were kept."""
        return len(self.run.rounds) == self.run.constants.rounds


@dataclass(frozen=True)
class LastModel:
    """The newest model: its F, its squared gradient, and its distance from a known optimum."""

    round: int
    value: float
    gradient: float
    distance: float | None


# ── measuring ───────────────────────────────────────────────────────────────────────────────────


def measure_run(
    folder: Folder, setup: Setup, num_probes: int, clients: int, device: str, tell: LogFn
) -> Measurements:
    """Replay the kept rounds of a run and measure them.

    Args:
        folder: the run.
        setup: the setup of the run's experiment.
        num_probes: at how many local steps each client's trajectory is examined.
        clients: over how many clients, at most, F is computed.
        device: where to compute.
        tell: is called with a sentence about the progress.
    """
    newest, _ = checkpoints.load_newest(folder.checkpoints, folder.experiment.digest, device)
    kept_files = _kept_files(folder, newest.round)
    trained = newest.coverage.ever
    global_loss = build_global_loss(setup, clients)
    first = zero_untrained(initial_state(setup).params, trained)
    num_clients = len(global_loss.client_weights)
    tell(f"F at the first model, over {num_clients} of {setup.clients} clients")
    start = global_loss.evaluate(first)
    rounds, persistent_bias = _replay_rounds(
        folder, setup, global_loss, trained, kept_files, newest.round, num_probes, device, tell
    )
    convex = None
    if is_softmax(setup.task.model.module) and num_clients == setup.clients:
        tell("the optimum")
        convex = solve_softmax(folder.experiment, global_loss, first, trained)
    tell("the Hessian's largest eigenvalue")
    curvature = global_loss.curvature(
        zero_untrained(newest.params, trained), folder.experiment.seed
    )
    counted = _counted_rounds(folder, kept_files, rounds, newest.round)
    all_rounds = len(rounds) == len(counted)
    estimates = _estimates(setup, rounds, start.value, curvature, all_rounds, global_loss, convex)
    constants = _to_constants(estimates, setup, rounds, counted)
    run = ReplayedRun(folder.experiment, setup, constants, rounds, _precisions(folder))
    return Measurements(
        run=run,
        constants=estimates,
        bounds=_bounds(run),
        trained=trained,
        rounds_done=newest.round,
        start_gradient=squared_norm(start.gradient, trained),
        persistent_bias=persistent_bias,
        last=_last(global_loss, newest.round, newest.params, trained, convex),
        convex=convex,
    )


def _replay_rounds(
    folder: Folder,
    setup: Setup,
    global_loss: GlobalLoss,
    trained: Mapping[str, Tensor],
    kept_files: Sequence[checkpoints.CheckpointFile],
    rounds_done: int,
    num_probes: int,
    device: str,
    tell: LogFn,
) -> tuple[list[ReplayedRound], float]:
    """Replay all kept rounds.

    Returns:
        The rounds in which a client answered, without their biases, and the squared length of the
        mean bias.
    """
    lines = {line["round"]: line for line in folder.metrics(rounds_done)}
    rounds: list[ReplayedRound] = []
    bias_sum: Params = {}
    for index, file in enumerate(kept_files):
        tell(f"replaying round {file.round} ({index + 1} of {len(kept_files)})")
        state = checkpoints.load_checkpoint(file, folder.experiment.digest, device)
        line = lines.get(file.round, {})
        _check_same_cohort(setup, line, file.round)
        replayed = replay_round(
            setup, state, global_loss, trained, num_probes, line.get("dropped", ())
        )
        if replayed is None:
            continue
        for name, tensor in replayed.bias.items():
            if name not in bias_sum:
                bias_sum[name] = torch.zeros_like(tensor, dtype=torch.float64)
            bias_sum[name] += tensor
        # Drop the vector: there may be many rounds, and it is as large as the model.
        rounds.append(replace(replayed, bias={}))
    if not rounds:
        raise RunError(
            f"in the kept rounds of {folder.path} no client answered, "
            "so there is nothing to certify"
        )
    return rounds, squared_norm(bias_sum) / len(rounds) ** 2


def _check_same_cohort(setup: Setup, line: Mapping[str, Any], round: int) -> None:
    """Raise RunError if other clients took part in a round than its experiment samples.

    That happens if devices joined, left, or had other capacities than those of the fleet.
    """
    if not line:
        return
    expected = {str(client.id): client.capacity for client in cohort_of(setup, round)}
    reported = {id: metrics["capacity"] for id, metrics in line.get("clients", {}).items()}
    dropped = {str(client) for client in line.get("dropped", ())}
    missing = expected.keys() - reported.keys() - dropped
    if missing or any(expected.get(id) != capacity for id, capacity in reported.items()):
        raise RunError(
            f"round {round + 1} cannot be replayed: nodes were missing or had other capacities "
            "than the experiment's fleet, so other clients took part than it draws"
        )


def _kept_files(folder: Folder, rounds_done: int) -> list[checkpoints.CheckpointFile]:
    """Return the kept states in which a round began, in order."""
    files = checkpoints.list_checkpoints(folder.kept)
    kept = sorted((file for file in files if file.round < rounds_done), key=lambda file: file.round)
    if kept:
        return kept
    total = folder.experiment.rounds
    example = list(range(0, total, max(1, total // 10)))
    raise RunError(
        f"{folder.path} keeps no round that could be replayed; run it again with keep_rounds, "
        f"such as --set 'keep_rounds={example}' (all rounds, if the certificate is to be exact)"
    )


def _counted_rounds(
    folder: Folder,
    kept_files: Sequence[checkpoints.CheckpointFile],
    rounds: Sequence[ReplayedRound],
    rounds_done: int,
) -> list[int]:
    """Return the rounds to which the theorems apply: those in which some client trained.

    A round without updates leaves the model as it is. For rounds that were not kept, the run's
    metrics say whether there were updates.
    """
    lines = folder.metrics(rounds_done)
    empty = {line["round"] for line in lines if line.get("train_loss", 0.0) is None}
    not_kept = set(range(rounds_done)) - {file.round for file in kept_files}
    return sorted({r.number for r in rounds} | (not_kept - empty))


def _precisions(folder: Folder) -> tuple[str, ...]:
    """Return the precisions in which the run was computed; a resumed run may have several."""
    sessions = [folder.manifest, *(folder.manifest.get("resumed") or [])]
    precisions = [session["precision"] for session in sessions if "precision" in session]
    return tuple(dict.fromkeys(precisions))


def _bounds(run: ReplayedRun) -> dict[str, Bound]:
    quantities = [r.quantities for r in run.rounds]
    bounds = {}
    for name, compute in BOUNDS.items():
        bound = compute(run.constants, quantities)
        bounds[name] = replace(bound, violated_assumptions=violated_assumptions(name, run))
    return bounds


def _last(
    global_loss: GlobalLoss,
    round: int,
    newest: Params,
    trained: Mapping[str, Tensor],
    convex: SoftmaxSolution | None,
) -> LastModel:
    params = zero_untrained(newest, trained)
    evaluation = global_loss.evaluate(params)
    distance = None
    if convex and convex.optimum:
        difference = {name: params[name].double() - best for name, best in convex.optimum.items()}
        distance = squared_norm(difference) ** 0.5
    return LastModel(round, evaluation.value, squared_norm(evaluation.gradient, trained), distance)


# ── the constants ───────────────────────────────────────────────────────────────────────────────


def _estimates(
    setup: Setup,
    rounds: Sequence[ReplayedRound],
    start: float,
    curvature: float,
    all_rounds: bool,
    global_loss: GlobalLoss,
    convex: SoftmaxSolution | None,
) -> dict[str, Estimate]:
    """Return the constants by name, each with its kind and origin.

    Args:
        setup: the setup of the run.
        rounds: the replayed rounds.
        start: F at the initial model.
        curvature: the largest eigenvalue of the Hessian of F at the newest model.
        all_rounds: whether `rounds` are all rounds in which a client trained.
        global_loss: F.
        convex: what is proved, for softmax regression.
    """
    paths = [path for r in rounds for path in r.paths]
    num_clients = len(global_loss.client_weights)
    all_clients = num_clients == setup.clients
    all_steps = all(len(path.probe_weights) == path.steps.count for path in paths)
    secant = max(path.secant for path in paths)
    along = max(r.curvature for r in rounds)

    def exact_if(condition: bool) -> str:
        return "exact" if condition else "estimate"

    estimates = {
        "L": Estimate(
            max(secant, along, curvature),
            "estimate",
            f"largest of secants on clients' paths {secant:.4g}, F along its way {along:.4g}, "
            f"Hessian {curvature:.4g}",
        ),
        "L_batch": Estimate(
            max(path.batch_secant for path in paths),
            exact_if(all_rounds and all_steps),
            "secants of batches on clients' paths",
        ),
        "G": Estimate(
            max(path.gradient for path in paths),
            "estimate",
            "mean over a client's batches, largest seen",
        ),
        "G_step": Estimate(
            max(path.step_gradient for path in paths),
            exact_if(all_rounds),
            "largest squared step gradient",
        ),
        "sigma2": Estimate(
            max(path.variance for path in paths),
            "estimate",
            "batches around their client; largest",
        ),
        "zeta2": Estimate(
            max(r.dissimilarity for r in rounds),
            exact_if(all_rounds and all_clients),
            f"{num_clients} of {setup.clients} clients around their mean, largest seen",
        ),
        "F_0": Estimate(start, exact_if(all_clients), "at the first model"),
        "F_least": Estimate(0.0, "proved", "cross-entropy is never negative"),
    }
    if convex:
        estimates |= _proved_constants(convex, estimates)
    return estimates


def _proved_constants(
    convex: SoftmaxSolution, estimates: dict[str, Estimate]
) -> dict[str, Estimate]:
    """Return proved constants that replace estimates; exact values, which are smaller, stay."""
    limits = convex.convex_constants
    proved = {
        "L": Estimate(
            limits.smoothness,
            "proved",
            "decay + half the largest eigenvalue of a client's second moments",
        ),
        "L_batch": Estimate(
            limits.batch_smoothness,
            "proved",
            "the same for batches: decay + half the largest squared length",
        ),
        "sigma2": Estimate(
            limits.variance,
            "proved",
            "2 max|x|^2 / batch size; 0 if a batch is everything",
        ),
        "F_least": Estimate(
            convex.least, "proved", "loss at the optimum less |gradient|^2/(2 decay) there"
        ),
    }
    input_limits = {
        "G": limits.gradient,
        "G_step": limits.gradient,
        "zeta2": limits.dissimilarity,
    }
    for name, limit in input_limits.items():
        if estimates[name].kind != "exact" and limit < float("inf"):
            proved[name] = Estimate(limit, "proved", "from the lengths of the inputs")
    largest_step = estimates["G_step"]
    if "G" in proved and largest_step.kind == "exact" and not limits.variance:
        # Without variance every batch is whole: a mean over batches is at most the largest of them.
        proved["G"] = Estimate(largest_step.value, "exact", largest_step.how)
    return proved


def _to_constants(
    estimates: dict[str, Estimate],
    setup: Setup,
    rounds: Sequence[ReplayedRound],
    counted: Sequence[int],
) -> Constants:
    num_steps = max(path.steps.count for r in rounds for path in r.paths)
    return Constants(
        smoothness=estimates["L"].value,
        batch_smoothness=estimates["L_batch"].value,
        gradient=estimates["G"].value,
        step_gradient=estimates["G_step"].value,
        variance=estimates["sigma2"].value,
        start=estimates["F_0"].value,
        least=estimates["F_least"].value,
        steps=LocalSteps(num_steps, setup.task.local.momentum),
        rounds=len(counted),
        lr_sum=sum(setup.lr(round) for round in counted),
    )
