"""How good a model is: accuracy and loss of the global model, of clients' parts of it, of what they trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.models import params_and_buffers
from fedcover.models.norms import calibrate, statistics_key, use_batch_statistics
from fedcover.server.collectives import SINGLE_PROCESS, ProcessGroup, is_remote
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.encoding import encode
from fedcover.submodels.reductions import Masks, Slices
from fedcover.types import Reduction, Samples, State, Task, Update

MODES = ("calibrated", "batch-compat")
EVAL_BATCH_SIZE = {"cpu": 256, "cuda": 2048}
"""How many samples go through a model at once: what a cache holds, or what fills a GPU."""

MOST_KEPT = 1 << 20
"""Parameters of the largest model that stays in memory between evaluations on a CPU: using it takes far longer."""

COMPAT_BATCH = 128
FULL_REDUCTION = Masks({})
"""The reduction that cuts nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Accuracy in [0, 1] and mean cross-entropy, of sums that a GPU may still be making: who reads them waits."""

    correct_loss_count_3: Tensor

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        right, _, number = self.correct_loss_count_3.tolist()
        return float(right / number)

    @property
    def loss(self) -> float:
        """The mean cross-entropy."""
        _, loss, number = self.correct_loss_count_3.tolist()
        return float(loss / number)


def eval_model(
    task: Task, state: State, reduction: Reduction, capacity: float, mode: str = "calibrated"
) -> nn.Module:
    """A client's part of the global model with the norm statistics it is evaluated with.

    `batch-compat` normalises with the test batch's own statistics, as several public codes do; its accuracy
    depends on the test batch and serves only to compare with them.
    """
    known = state.statistics.get(statistics_key(task.norm, capacity) or "")
    part = submodel(task.model.module, reduction, {**state.params, **(known or {})})
    if mode == "batch-compat":
        return use_batch_statistics(part).eval()
    return part.eval() if known else calibrate(part, task.source.calibration)


@dataclass(slots=True, eq=False)
class EvalModule:
    """The whole model in a module that is kept for evaluation: making one takes as long as using it."""

    module: nn.Module
    loaded_state: State | None = None

    def eval_model(self, task: Task, state: State) -> nn.Module:
        """The module with a state's parameters and the norm statistics that they are evaluated with."""
        reset_module_state(self.module, task.model.module)
        if self.loaded_state is state:  # as when test and validation follow each other
            return self.module
        self.loaded_state = None
        known = state.statistics.get(statistics_key(task.norm, 1.0) or "")
        room = params_and_buffers(self.module)
        values = {**state.params, **(known or {})}
        with torch.no_grad():
            torch._foreach_copy_([room[name] for name in values], list(values.values()))
        made = self.module.eval() if known else calibrate(self.module, task.source.calibration)
        self.loaded_state = state
        return made


def reset_module_state(kept: nn.Module, first: nn.Module) -> None:
    """Let a copy forget what it counted or remembered while it was used: no evaluation may depend on those before.

    Norm statistics, which are set for every evaluation, are left alone; so is what lies deeper than plain values.
    """
    for part, origin in zip(kept.modules(), first.modules(), strict=True):
        if isinstance(origin, _BatchNorm):
            continue
        for name, buffer in origin.named_buffers(recurse=False):
            part._buffers[name] = (
                buffer.clone()
            )  # not copied into: it may be a view that cannot be written
        if not type(origin).__module__.startswith("torch."):
            vars(part).update(
                {n: v for n, v in vars(origin).items() if isinstance(v, _PLAIN) and n != "training"}
            )


_PLAIN = (int, float, str, bool, type(None))
_EVAL_MODULES: WeakKeyDictionary[nn.Module, EvalModule] = WeakKeyDictionary()


def _full_model(task: Task, state: State) -> nn.Module:
    module = task.model.module
    entries = [tensor for tensor in state.params.values() if tensor.device.type == "cpu"]
    if sum(tensor.numel() for tensor in entries) > MOST_KEPT:
        return eval_model(task, state, FULL_REDUCTION, 1.0)
    if module not in _EVAL_MODULES:
        _EVAL_MODULES[module] = EvalModule(submodel(module, FULL_REDUCTION, state.params))
    return _EVAL_MODULES[module].eval_model(task, state)


@torch.no_grad()
def logits(module: nn.Module, x: Tensor, batch: int | None = None) -> Tensor:
    """What a module says about every input."""
    if x.is_cuda and x.ndim == 4:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = batch or EVAL_BATCH_SIZE[x.device.type]
    return torch.cat([module(part) for part in torch.split(x, batch)])


def score(logits_BK: Tensor, y_B: Tensor, ranks: ProcessGroup = SINGLE_PROCESS) -> Score:
    """Accuracy and loss of given logits, of which every process has some."""
    right = (logits_BK.argmax(1) == y_B).double().sum()
    sums_3 = torch.stack(
        [
            right,
            F.cross_entropy(logits_BK.double(), y_B, reduction="sum"),
            right.new_full((), y_B.numel()),
        ]
    )
    ranks.total([sums_3])
    return Score(sums_3)


def evaluate(
    task: Task,
    state: State,
    samples: Samples,
    *,
    mode: str = "calibrated",
    reduction: Reduction = FULL_REDUCTION,
    capacity: float = 1.0,
    ranks: ProcessGroup = SINGLE_PROCESS,
) -> Score:
    """The score of the global model, or of a client's part of it, on some samples; every process looks at a share."""
    if mode == "batch-compat":  # depends on the batches, so every process looks at all of them
        compatible = eval_model(task, state, reduction, capacity, mode)
        return score(logits(compatible, samples.x, COMPAT_BATCH), samples.y)
    model = (
        _full_model(task, state)
        if reduction is FULL_REDUCTION
        else eval_model(task, state, reduction, capacity)
    )
    local_slice = ranks.local_slice(len(samples))
    return score(logits(model, samples.x[local_slice]), samples.y[local_slice], ranks)


def local_accuracy(
    task: Task, state: State, updates: Sequence[Update], ranks: ProcessGroup = SINGLE_PROCESS
) -> tuple[float, float] | None:
    """What the round's clients would see: on the test samples of their labels, weighted by their samples.

    First with their own part of the new global model, then with the model each had just trained. None where the test
    set has none of their labels. Every process looks at the clients that it has trained.
    """
    test = task.source.test
    answers: dict[object, Tensor] = {}  # clients with the same part share its answers
    own = trained = weight = 0.0
    for update in updates:
        if is_remote(update.params):
            continue
        client, sent = update.client, update.sent
        name = (encode(sent) if isinstance(sent, Slices) else id(sent), client.capacity)
        if name not in answers:
            part = eval_model(task, state, update.sent, client.capacity)
            answers[name] = logits(part, test.x).argmax(1)
        mine = torch.isin(test.y, torch.tensor(client.labels, device=test.y.device))
        mine = mine if mine.ndim == 1 else mine.flatten(1).any(1)  # a sequence has many labels
        if not bool(mine.any()):
            continue
        own += client.samples * float((answers[name] == test.y)[mine].double().mean())
        answer = logits(_as_trained(task, update), test.x[mine]).argmax(1)
        trained += client.samples * float((answer == test.y[mine]).double().mean())
        weight += client.samples
    sums_3 = torch.tensor([own, trained, weight], dtype=torch.float64)
    ranks.total([sums_3])
    own, trained, weight = sums_3.tolist()
    return (own / weight, trained / weight) if weight else None


def _as_trained(task: Task, update: Update) -> nn.Module:
    part = submodel(task.model.module, update.sent, {})
    load_tensors(part, {**update.params, **update.buffers})
    return part.eval() if update.buffers else calibrate(part, task.source.calibration)
