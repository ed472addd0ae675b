"""Measurement of a run: replay its kept rounds, and compute both sides of every bound."""

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
from fedcover.tensors import squared_norm
from fedcover.theory import BOUNDS, Bound
from fedcover.theory.certificate.assumptions import ReplayedRun, violated_assumptions
from fedcover.theory.certificate.constants import Estimate, estimate_constants, to_constants
from fedcover.theory.certificate.global_loss import GlobalLoss, build_global_loss
from fedcover.theory.certificate.replay import (
    ReplayedRound,
    entries_where,
    replay_round,
    zero_untrained,
)
from fedcover.theory.certificate.softmax_case import SoftmaxSolution, is_softmax, solve_softmax
from fedcover.types import Params

LogFn = Callable[[str], None]


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
    tell(f"F at the first model, over {num_clients} of {setup.experiment.clients} clients")
    start = global_loss.evaluate(first)
    rounds, persistent_bias = _replay_rounds(
        folder, setup, global_loss, trained, kept_files, newest.round, num_probes, device, tell
    )
    convex = None
    if is_softmax(setup.task.model.module) and num_clients == setup.experiment.clients:
        tell("the optimum")
        convex = solve_softmax(folder.experiment, global_loss, first, trained)
    tell("the Hessian's largest eigenvalue")
    curvature = global_loss.curvature(
        zero_untrained(newest.params, trained), folder.experiment.seed
    )
    counted = _counted_rounds(folder, kept_files, rounds, newest.round)
    all_rounds = len(rounds) == len(counted)
    estimates = estimate_constants(
        setup, rounds, start.value, curvature, all_rounds, global_loss, convex
    )
    constants = to_constants(estimates, setup, rounds, counted)
    run = ReplayedRun(folder.experiment, setup, constants, rounds, _precisions(folder))
    return Measurements(
        run=run,
        constants=estimates,
        bounds=_bounds(run),
        trained=trained,
        rounds_done=newest.round,
        start_gradient=squared_norm(entries_where(start.gradient, trained)),
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
    return rounds, squared_norm(bias_sum.values()) / len(rounds) ** 2


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
    files_in_order = sorted(
        (file for file in files if file.round < rounds_done), key=lambda file: file.round
    )
    if files_in_order:
        return files_in_order
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
        distance = squared_norm(difference.values()) ** 0.5
    return LastModel(
        round, evaluation.value, squared_norm(entries_where(evaluation.gradient, trained)), distance
    )
