"""Which assumptions of a theorem a run violates: one sentence for each.

Each check gets a `ReplayedRun`. It returns None if its assumption holds, otherwise a sentence. The
docstring of a check states the assumption. `CHECKS_OF_BOUND` lists the checks of each theorem.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.dropout import _DropoutNd

from fedcover.models.norms import has_batch_norm
from fedcover.runs.experiment import Experiment
from fedcover.server.cohort import cohort_of, view_of
from fedcover.server.round import initial_state
from fedcover.server.round_setup import Setup
from fedcover.theory import Constants
from fedcover.theory.certificate.replay import ReplayedRound

SLOT_POLICIES = ("full", "homogeneous", "prefix", "rolling", "random", "magnitude", "regions")
"""Policies whose masks depend only on a client's slot in the cohort and on its capacity."""

RELATIVE_TOLERANCE = 1e-9
"""Differences between clients below this share of the squared gradient are rounding errors."""


@dataclass(frozen=True)
class ReplayedRun:
    """A run, its replayed rounds, and the constants that were measured."""

    experiment: Experiment
    setup: Setup
    constants: Constants
    rounds: Sequence[ReplayedRound]
    precisions: Sequence[str]
    """The precisions in which the run was computed; its replay is in fp32."""

    @property
    def policy(self) -> str | None:
        """The name of the policy; None if it is not built in."""
        return self.setup.policy.name

    @property
    def step_counts(self) -> set[int]:
        """The different numbers of local steps that clients made."""
        return {path.steps.count for r in self.rounds for path in r.paths}

    @property
    def shuffled(self) -> bool:
        """Whether some client has several batches, so that its epochs are shuffled."""
        return any(
            path.client.samples > self.experiment.batch_size
            for r in self.rounds
            for path in r.paths
        )

    @property
    def heterogeneous(self) -> bool:
        """Whether clients' data differ."""
        return any(
            r.dissimilarity > RELATIVE_TOLERANCE * max(r.gradient, 1e-12) for r in self.rounds
        )


AssumptionCheck = Callable[[ReplayedRun], str | None]


def violated_assumptions(name: str, run: ReplayedRun) -> tuple[str, ...]:
    """Return one sentence for each assumption of a bound that the run violates."""
    sentences = (check(run) for check in CHECKS_OF_BOUND[name])
    return tuple(sentence for sentence in sentences if sentence)


# ── training and aggregation ────────────────────────────────────────────────────────────────────


def local_steps(run: ReplayedRun) -> str | None:
    """A local step is SGD on the cross-entropy."""
    experiment = run.experiment
    changes = [
        f"recipe {experiment.recipe}" if experiment.recipe != "plain" else "",
        f"absent_labels {experiment.absent_labels}" if experiment.absent_labels != "free" else "",
        "label_rows" if experiment.label_rows else "",
        "the scaler" if experiment.scaler else "",
        f"augment {experiment.augment}" if experiment.augment != "none" else "",
        "clipping" if experiment.clip is not None else "",
    ]
    description = ", ".join(change for change in changes if change)
    return f"local steps are not plain SGD on F_n: {description}" if description else None


def precision(run: ReplayedRun) -> str | None:
    """A step follows the gradient itself, up to the rounding of float32."""
    lower = [name for name in run.precisions if name != "fp32"]
    if not lower:
        return None
    description = " and ".join(lower)
    return f"local steps were computed in {description}: not along gradients of F_n in float32"


def server(run: ReplayedRun) -> str | None:
    """The server takes the coverage mean of the clients' updates, as they are."""
    experiment = run.experiment
    changes = [
        f"rule {experiment.rule}" if experiment.rule != "coverage_mean" else "",
        f"server {experiment.server}" if experiment.server != "none" else "",
        f"clip_updates {experiment.clip_updates:g}" if experiment.clip_updates is not None else "",
        f"privacy {experiment.privacy}" if run.setup.privacy is not None else "",
    ]
    description = ", ".join(change for change in changes if change)
    return f"the server does more than average: {description}" if description else None


def norms(run: ReplayedRun) -> str | None:
    """A loss is a mean over samples."""
    if not has_batch_norm(run.setup.task.model.module):
        return None
    return "batch norm: the loss of a batch is not a mean over its samples"


def no_dropout(run: ReplayedRun) -> str | None:
    """The model is a deterministic function of its parameters."""
    layers = run.setup.task.model.module.modules()
    has_dropout = any(isinstance(layer, _DropoutNd) and layer.p for layer in layers)
    return "dropout draws in the forward pass" if has_dropout else None


def uncovered_kept(run: ReplayedRun) -> str | None:
    """A parameter that nobody trains in a round keeps its value."""
    if run.experiment.uncovered != "zero" or all(r.gamma > 0 for r in run.rounds):
        return None
    return "parameters that a round does not train are set to zero"


# ── the model and the schedule ──────────────────────────────────────────────────────────────────


def model_carried_over(run: ReplayedRun) -> str | None:
    """A round begins with the model with which the previous round ended."""
    setup = run.setup
    if setup.policy.grow is None:
        return None
    state = initial_state(setup)
    for round in range(1, setup.experiment.rounds):
        view = view_of(setup, replace(state, round=round), cohort_of(setup, round))
        if setup.policy.grow(view):
            return f"policy {run.policy} changes the model between rounds, before round {round}"
    return None


def momentum(run: ReplayedRun) -> str | None:
    """The paper's local steps have no momentum."""
    return f"momentum {run.experiment.momentum:g}" if run.experiment.momentum else None


def schedule(run: ReplayedRun) -> str | None:
    """The paper's learning rate is constant."""
    schedule_name = run.experiment.schedule
    return None if schedule_name == "constant" else f"schedule {schedule_name}"


def full_coverage(run: ReplayedRun) -> str | None:
    """Every parameter is covered in every round."""
    for r in run.rounds:
        if r.gamma == 0:
            return f"parameters of the union model that no client trains in round {r.number}"
    return None


def minimum_lr_one(run: ReplayedRun) -> str | None:
    """The learning rate is large enough for the first term of Theorem 1, 4F_0/sqrt(Q)."""
    minimum = 1 / (run.constants.steps.count * run.constants.rounds**0.5)
    if max(r.quantities.lr for r in run.rounds) >= minimum * (1 - 1e-9):
        return None
    return "learning rate below 1/(T sqrt(Q)): the printed first term is too small"


def minimum_lr_two(run: ReplayedRun) -> str | None:
    """The learning rate is large enough for the first term of Theorem 2 as printed."""
    minimum = 1 / (run.constants.steps.count * run.constants.rounds) ** 0.5
    if max(r.quantities.lr for r in run.rounds) >= minimum * (1 - 1e-9):
        return None
    return "learning rate below 1/sqrt(T Q): the printed first term is too small"


# ── the clients ─────────────────────────────────────────────────────────────────────────────────


def equal_steps(run: ReplayedRun) -> str | None:
    """All clients make the same number of steps."""
    counts = run.step_counts
    return f"clients make {min(counts)} to {max(counts)} local steps" if len(counts) > 1 else None


def with_replacement(run: ReplayedRun) -> str | None:
    """Every batch is drawn independently."""
    return "epochs are shuffled: batches are not independent draws" if run.shuffled else None


def equal_data(run: ReplayedRun) -> str | None:
    """All clients have the same loss."""
    if not run.heterogeneous:
        return None
    return f"clients' data differ: zeta^2 up to {max(r.dissimilarity for r in run.rounds):.3g}"


def unbiased(run: ReplayedRun) -> str | None:
    """The holders of a parameter have, on average, the gradient of all clients (Assumption 5)."""
    bias = max(r.quantities.bias for r in run.rounds)
    gradient = max(r.quantities.gradient for r in run.rounds)
    if bias <= RELATIVE_TOLERANCE * max(gradient, 1e-12):
        return None
    return f"the holders of a parameter are biased: squared bias up to {bias:.3g}"


def uniform(run: ReplayedRun) -> str | None:
    """All clients count the same."""
    sample_counts = {path.client.samples for r in run.rounds for path in r.paths}
    if run.experiment.weights == "uniform" or len(sample_counts) == 1:
        return None
    return "clients count by their samples"


def masks_by_slot(run: ReplayedRun) -> str | None:
    """Masks do not depend on who a client is."""
    if run.experiment.assignment == "device" and len(run.setup.fleet.levels) > 1:
        return (
            "capacity belongs to the device, so that masks depend on who is drawn "
            "(assignment = 'slot' would not)"
        )
    if run.policy in SLOT_POLICIES:
        return None
    policy = f"policy {run.policy}" if run.policy else "a policy of your own"
    return f"{policy} may give masks by who a client is"


# ── the assumptions of each bound ───────────────────────────────────────────────────────────────


COMMON_CHECKS: tuple[AssumptionCheck, ...] = (
    local_steps,
    precision,
    server,
    norms,
    no_dropout,
    uncovered_kept,
    model_carried_over,
)
PAPER_CHECKS: tuple[AssumptionCheck, ...] = (
    *COMMON_CHECKS,
    momentum,
    schedule,
    full_coverage,
    equal_steps,
    with_replacement,
    uniform,
)
CHECKS_OF_BOUND: dict[str, tuple[AssumptionCheck, ...]] = {
    "printed_one": (*PAPER_CHECKS, minimum_lr_one, equal_data),
    "printed_two": (*PAPER_CHECKS, minimum_lr_two, unbiased),
    "corrected_one": (*COMMON_CHECKS, momentum, equal_steps, with_replacement, uniform, equal_data),
    "corrected_two": (*COMMON_CHECKS, momentum, equal_steps, with_replacement, uniform, unbiased),
    "sharper": (*COMMON_CHECKS, equal_steps, with_replacement, equal_data),
    "sharper_biased": (*COMMON_CHECKS, equal_steps, with_replacement),
    "partial_participation": (
        *COMMON_CHECKS,
        equal_steps,
        with_replacement,
        uniform,
        masks_by_slot,
    ),
    "reshuffled": COMMON_CHECKS,
}
"""The assumptions of each bound."""
