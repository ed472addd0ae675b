"""The constants of the theorems, from the replayed rounds of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.server.round_setup import Setup
from fedcover.theory import Constants, LocalSteps
from fedcover.theory.certificate.global_loss import GlobalLoss
from fedcover.theory.certificate.replay import ReplayedRound
from fedcover.theory.certificate.softmax_case import SoftmaxSolution
from fedcover.theory.certificate.trajectories import ClientTrajectory


@dataclass(frozen=True)
class Estimate:
    """A constant of the theorems.

    `kind` is "proved", "exact" (for this run) or "estimate"; `how` says where the value is from.
    """

    value: float
    kind: str
    how: str


def estimate_constants(
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
    num_clients = len(global_loss.client_weights)
    all_clients = num_clients == setup.experiment.clients
    estimates = {
        "L": _smoothness(rounds, curvature),
        **_path_constants([path for r in rounds for path in r.paths], all_rounds),
        "zeta2": Estimate(
            max(r.dissimilarity for r in rounds),
            _exact_if(all_rounds and all_clients),
            f"{num_clients} of {setup.experiment.clients} clients around their mean, largest seen",
        ),
        "F_0": Estimate(start, _exact_if(all_clients), "at the first model"),
        "F_least": Estimate(0.0, "proved", "cross-entropy is never negative"),
    }
    if convex:
        estimates |= _proved_constants(convex, estimates)
    return estimates


def _exact_if(condition: bool) -> str:
    return "exact" if condition else "estimate"


def _smoothness(rounds: Sequence[ReplayedRound], curvature: float) -> Estimate:
    secant = max(path.secant for r in rounds for path in r.paths)
    along = max(r.curvature for r in rounds)
    return Estimate(
        max(secant, along, curvature),
        "estimate",
        f"largest of secants on clients' paths {secant:.4g}, F along its way {along:.4g}, "
        f"Hessian {curvature:.4g}",
    )


def _path_constants(paths: Sequence[ClientTrajectory], all_rounds: bool) -> dict[str, Estimate]:
    """Return the constants that are the largest values on the clients' paths."""
    all_steps = all(len(path.probe_weights) == path.steps.count for path in paths)
    return {
        "L_batch": Estimate(
            max(path.batch_secant for path in paths),
            _exact_if(all_rounds and all_steps),
            "secants of batches on clients' paths",
        ),
        "G": Estimate(
            max(path.gradient for path in paths),
            "estimate",
            "mean over a client's batches, largest seen",
        ),
        "G_step": Estimate(
            max(path.step_gradient for path in paths),
            _exact_if(all_rounds),
            "largest squared step gradient",
        ),
        "sigma2": Estimate(
            max(path.variance for path in paths),
            "estimate",
            "batches around their client; largest",
        ),
    }


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


def to_constants(
    estimates: dict[str, Estimate],
    setup: Setup,
    rounds: Sequence[ReplayedRound],
    counted: Sequence[int],
) -> Constants:
    """Return the values of the constants, in the form that the bounds need."""
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
