"""In which respects a run lies outside a theorem's assumptions: one sentence each."""

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
"""Policies whose masks depend on a client's place in the cohort and its capacity, never on who it is."""

RELATIVE_TOLERANCE = 1e-9
"""Below this share of the squared gradient a difference between clients' data is rounding."""


@dataclass(frozen=True)
class ReplayedRun:
    """What the sentences are about."""

    experiment: Experiment
    setup: Setup
    known: Constants
    rounds: Sequence[ReplayedRound]
    precisions: Sequence[str]
    """Those in which the run was computed; its replay is in fp32."""

    @property
    def policy(self) -> str | None:
        """Return the name of the policy that gave the masks; None if it is not built in."""
        return self.setup.policy.name

    @property
    def step_counts(self) -> set[int]:
        """The numbers of local steps that clients made."""
        return {path.steps.count for r in self.rounds for path in r.paths}

    @property
    def shuffled(self) -> bool:
        """Whether a client's batch is less than all its rows, so that an epoch draws without putting back."""
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


def local_steps(case: ReplayedRun) -> str | None:
    """A local step is SGD on the cross-entropy."""
    own = case.experiment
    changed = [
        f"recipe {own.recipe}" if own.recipe != "plain" else "",
        f"absent_labels {own.absent_labels}" if own.absent_labels != "free" else "",
        "label_rows" if own.label_rows else "",
        "the scaler" if own.scaler else "",
        f"augment {own.augment}" if own.augment != "none" else "",
        "clipping" if own.clip is not None else "",
    ]
    named = [name for name in changed if name]
    return f"local steps are not plain SGD on F_n: {', '.join(named)}" if named else None


def precision(case: ReplayedRun) -> str | None:
    """A step follows the gradient itself, to the rounding of float32."""
    less = [name for name in case.precisions if name != "fp32"]
    return (
        f"local steps were computed in {' and '.join(less)}: not along gradients of F_n in float32"
        if less
        else None
    )


def server(case: ReplayedRun) -> str | None:
    """The server takes the coverage mean of what clients send, as they send it."""
    own = case.experiment
    changed = [
        f"rule {own.rule}" if own.rule != "coverage_mean" else "",
        f"server {own.server}" if own.server != "none" else "",
        f"clip_updates {own.clip_updates:g}" if own.clip_updates is not None else "",
        f"privacy {own.privacy}" if case.setup.privacy is not None else "",
    ]
    named = [name for name in changed if name]
    return f"the server does more than average: {', '.join(named)}" if named else None


def norms(case: ReplayedRun) -> str | None:
    """A loss is a mean over samples."""
    normed = has_batch_norm(case.setup.task.model.module)
    return "batch norm: the loss of a batch is no mean over its samples" if normed else None


def no_dropout(case: ReplayedRun) -> str | None:
    """The model is a function of its parameters."""
    layers = case.setup.task.model.module.modules()
    return (
        "dropout draws in the forward pass"
        if any(isinstance(m, _DropoutNd) and m.p for m in layers)
        else None
    )


def uncovered_kept(case: ReplayedRun) -> str | None:
    """A parameter that nobody trains in a round keeps its value."""
    idle = case.experiment.uncovered == "zero" and any(r.gamma == 0 for r in case.rounds)
    return "parameters that a round does not train are set to zero" if idle else None


def model_carried_over(case: ReplayedRun) -> str | None:
    """A round begins with the model that the round before has ended with."""
    setup, growth, state = case.setup, case.setup.growth, initial_state(case.setup)
    for round in range(1, setup.rounds):
        if growth and growth(view_of(setup, replace(state, round=round), cohort_of(setup, round))):
            return f"policy {case.policy} changes the model between rounds, before round {round}"
    return None


def momentum(case: ReplayedRun) -> str | None:
    """The paper's local steps have no momentum."""
    return f"momentum {case.experiment.momentum:g}" if case.experiment.momentum else None


def schedule(case: ReplayedRun) -> str | None:
    """The paper's learning rate is constant."""
    return (
        None if case.experiment.schedule == "constant" else f"schedule {case.experiment.schedule}"
    )


def full_coverage(case: ReplayedRun) -> str | None:
    """Every parameter is covered in every round."""
    rounds = [r.number for r in case.rounds if r.gamma == 0]
    return (
        f"parameters of the union model that no client trains in round {rounds[0]}"
        if rounds
        else None
    )


def minimum_lr_one(case: ReplayedRun) -> str | None:
    """Theorem 1 as printed bounds its first term by 4F_0/sqrt(Q), which needs the learning rate to be that large."""
    wanted = 1 / (case.known.steps.count * case.known.rounds**0.5)
    lr = max(r.quantities.lr for r in case.rounds)
    return (
        None
        if lr >= wanted * (1 - 1e-9)
        else "learning rate below 1/(T sqrt(Q)): the printed first term is too small"
    )


def minimum_lr_two(case: ReplayedRun) -> str | None:
    """The same for Theorem 2."""
    wanted = 1 / (case.known.steps.count * case.known.rounds) ** 0.5
    lr = max(r.quantities.lr for r in case.rounds)
    return (
        None
        if lr >= wanted * (1 - 1e-9)
        else "learning rate below 1/sqrt(T Q): the printed first term is too small"
    )


def equal_steps(case: ReplayedRun) -> str | None:
    """All clients make the same number of steps."""
    counts = case.step_counts
    return f"clients make {min(counts)} to {max(counts)} local steps" if len(counts) > 1 else None


def with_replacement(case: ReplayedRun) -> str | None:
    """Every batch is drawn independently."""
    return "epochs are shuffled: batches are not independent draws" if case.shuffled else None


def equal_data(case: ReplayedRun) -> str | None:
    """All clients have the same loss."""
    if not case.heterogeneous:
        return None
    return f"clients' data differ: zeta^2 up to {max(r.dissimilarity for r in case.rounds):.3g}"


def unbiased(case: ReplayedRun) -> str | None:
    """Assumption 5: the clients that hold a parameter have together the gradient of all."""
    bias = max(r.quantities.bias for r in case.rounds)
    if bias <= RELATIVE_TOLERANCE * max(max(r.quantities.gradient for r in case.rounds), 1e-12):
        return None
    return f"the holders of a parameter are biased: squared bias up to {bias:.3g}"


def uniform(case: ReplayedRun) -> str | None:
    """All clients count the same."""
    same = len({path.client.samples for r in case.rounds for path in r.paths}) == 1
    return (
        None if case.experiment.weights == "uniform" or same else "clients count by their samples"
    )


def masks_by_slot(case: ReplayedRun) -> str | None:
    """Masks do not depend on who a client is."""
    levels = case.setup.fleet.levels
    by_device = case.experiment.assignment == "device" and len(levels) > 1
    if by_device:
        return "capacity belongs to the device, so that masks depend on who is drawn (assignment = 'slot' would not)"
    if case.policy in SLOT_POLICIES:
        return None
    return f"{f'policy {case.policy}' if case.policy else 'a policy of your own'} may give masks by who a client is"


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
"""What every theorem assumes of a run."""


def violated_assumptions(name: str, case: ReplayedRun) -> tuple[str, ...]:
    """The sentences that are true of this run and should not be."""
    found = (sentence(case) for sentence in CHECKS_OF_BOUND[name])
    return tuple(sentence for sentence in found if sentence)
