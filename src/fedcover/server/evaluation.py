"""Accuracy and loss of the global model, of clients' sub-models, and of the models they trained.

Suffixes of tensors: B samples, K classes, a number the length of an axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
from fedcover.types import Params, Reduction, Samples, State, Task, Update

MODES = ("calibrated", "batch-compat")
"""Where norm statistics come from: training or calibration samples, or the test batch itself."""
EVAL_BATCH_SIZE = {"cpu": 256, "cuda": 2048}
"""How many samples go through a model at once: as many as fit a cache, or fill a GPU."""
COMPAT_BATCH = 128
"""The batch size of the mode `batch-compat`, whose scores depend on it."""
MAX_CACHED_ELEMENTS = 1 << 20
"""The largest model, in parameters, of which a CPU keeps a module for all evaluations.

Larger models take far longer to evaluate than to build.
"""

FULL_REDUCTION = Masks({})
"""The reduction that cuts nothing."""


# ── scores ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Accuracy in [0, 1] and mean cross-entropy.

    A GPU may still be computing the sums; reading a score waits for it.
    """

    correct_loss_count_3: Tensor

    @property
    def accuracy(self) -> float:
        """The share of correct answers."""
        correct, _, count = self.correct_loss_count_3.tolist()
        return float(correct / count)

    @property
    def loss(self) -> float:
        """The mean cross-entropy."""
        _, loss, count = self.correct_loss_count_3.tolist()
        return float(loss / count)


@torch.no_grad()
def logits(module: nn.Module, x: Tensor, batch: int | None = None) -> Tensor:
    """Return the outputs of a module for all inputs, computed in batches."""
    if x.is_cuda and x.ndim == 4:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch = batch or EVAL_BATCH_SIZE[x.device.type]
    return torch.cat([module(part) for part in torch.split(x, batch)])


def score(logits_BK: Tensor, y_B: Tensor, process_group: ProcessGroup = SINGLE_PROCESS) -> Score:
    """Return accuracy and loss of all processes' logits together."""
    correct = (logits_BK.argmax(1) == y_B).double().sum()
    loss = F.cross_entropy(logits_BK.double(), y_B, reduction="sum")
    count = correct.new_full((), y_B.numel())
    sums_3 = torch.stack([correct, loss, count])
    process_group.total([sums_3])
    return Score(sums_3)


def evaluate(
    task: Task,
    state: State,
    samples: Samples,
    *,
    mode: str = "calibrated",
    reduction: Reduction = FULL_REDUCTION,
    capacity: float = 1.0,
    process_group: ProcessGroup = SINGLE_PROCESS,
    global_module: "ReusedGlobalModule | None" = None,
) -> Score:
    """Score the global model, or a client's part of it.

    Args:
        task: the model and what else training needs.
        state: the parameters and norm statistics.
        samples: the samples to score on.
        mode: where norm statistics come from; one of `MODES`.
        reduction: the part of the model; by default all of it.
        capacity: the capacity whose norm statistics are used.
        process_group: the processes that share the samples.
        global_module: the module that the run reuses for its global model, if it has one.
    """
    if mode == "batch-compat":
        # The score depends on the batches, so every process evaluates all of them.
        model = eval_model(task, state, reduction, capacity, mode)
        return score(logits(model, samples.x, COMPAT_BATCH), samples.y)
    if reduction is FULL_REDUCTION:
        model = (global_module or ReusedGlobalModule()).load(task, state)
    else:
        model = eval_model(task, state, reduction, capacity)
    local_rows = process_group.local_slice(len(samples))
    return score(logits(model, samples.x[local_rows]), samples.y[local_rows], process_group)


def client_accuracies(
    task: Task,
    state: State,
    updates: Sequence[Update],
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[float, float] | None:
    """Return the mean accuracy of the round's clients on test samples with their own labels.

    Clients count by their numbers of samples. Every process evaluates the clients that it trained.

    Returns:
        The accuracy of each client's part of the new global model, and that of the model it had
        just trained; None if the test set has none of the clients' labels.
    """
    test = task.source.test
    predictions: dict[object, Tensor] = {}  # shared by clients with the same part
    global_sum = trained_sum = weight = 0.0
    for update in updates:
        if is_remote(update.params):
            continue
        client, sent = update.client, update.sent
        key = (encode(sent) if isinstance(sent, Slices) else id(sent), client.capacity)
        if key not in predictions:
            part = eval_model(task, state, sent, client.capacity)
            predictions[key] = logits(part, test.x).argmax(1)
        own_rows = _rows_with_labels(test.y, client.labels)
        if not bool(own_rows.any()):
            continue
        own_y = test.y[own_rows]
        own_predictions = logits(_trained_model(task, update), test.x[own_rows]).argmax(1)
        global_accuracy = float((predictions[key] == test.y)[own_rows].double().mean())
        trained_accuracy = float((own_predictions == own_y).double().mean())
        global_sum += client.samples * global_accuracy
        trained_sum += client.samples * trained_accuracy
        weight += client.samples
    sums_3 = torch.tensor([global_sum, trained_sum, weight], dtype=torch.float64)
    process_group.total([sums_3])
    global_sum, trained_sum, weight = sums_3.tolist()
    return (global_sum / weight, trained_sum / weight) if weight else None


def _rows_with_labels(y: Tensor, labels: Sequence[int]) -> Tensor:
    """Return True for each row with one of these labels; a sequence has several labels in a row."""
    matches = torch.isin(y, torch.tensor(labels, device=y.device))
    return matches if matches.ndim == 1 else matches.flatten(1).any(1)


# ── the evaluated modules ───────────────────────────────────────────────────────────────────────


def eval_model(
    task: Task, state: State, reduction: Reduction, capacity: float, mode: str = "calibrated"
) -> nn.Module:
    """Build a client's part of the global model, with the norm statistics for its evaluation.

    `batch-compat` normalises with the statistics of the test batch, as several public codes do. Its
    accuracy depends on the test batch and serves only to compare with them.
    """
    statistics = _norm_statistics(task, state, capacity)
    part = submodel(task.model.module, reduction, {**state.params, **statistics})
    if mode == "batch-compat":
        return use_batch_statistics(part).eval()
    return part.eval() if statistics else calibrate(part, task.source.calibration)


def _norm_statistics(task: Task, state: State, capacity: float) -> Params:
    """Return the tracked norm statistics of some width; empty if none are tracked."""
    key = statistics_key(task.norm, capacity)
    return state.statistics.get(key, {}) if key else {}


def _trained_model(task: Task, update: Update) -> nn.Module:
    """Build the model that a client had at the end of its training."""
    part = submodel(task.model.module, update.sent, {})
    load_tensors(part, {**update.params, **update.buffers})
    return part.eval() if update.buffers else calibrate(part, task.source.calibration)


@dataclass(slots=True, eq=False)
class ReusedGlobalModule:
    """The module in which a run evaluates its global model, round after round.

    It is reused unless it is large, since building one takes as long as evaluating it.
    """

    _module: nn.Module | None = None
    _loaded_state: State | None = None

    def load(self, task: Task, state: State) -> nn.Module:
        """Return the module with a state's parameters and norm statistics."""
        cpu_params = [tensor for tensor in state.params.values() if tensor.device.type == "cpu"]
        if sum(tensor.numel() for tensor in cpu_params) > MAX_CACHED_ELEMENTS:
            return eval_model(task, state, FULL_REDUCTION, 1.0)
        if self._module is None:
            self._module = submodel(task.model.module, FULL_REDUCTION, state.params)
        reset_module_state(self._module, task.model.module)
        if self._loaded_state is state:  # the test set was just evaluated, now the validation set
            return self._module
        self._loaded_state = None  # in case calibration fails below
        statistics = _norm_statistics(task, state, 1.0)
        values = {**state.params, **statistics}
        tensors = params_and_buffers(self._module)
        with torch.no_grad():
            torch._foreach_copy_([tensors[name] for name in values], list(values.values()))
        if statistics:
            module = self._module.eval()
        else:
            module = calibrate(self._module, task.source.calibration)
        self._loaded_state = state
        return module


def reset_module_state(module: nn.Module, original: nn.Module) -> None:
    """Undo what a copy of a module counted or remembered, so that evaluations are independent.

    Norm statistics are left alone, as every evaluation sets them. So are attributes that are
    neither buffers nor plain values.
    """
    for layer, original_layer in zip(module.modules(), original.modules(), strict=True):
        if isinstance(original_layer, _BatchNorm):
            continue
        for name, buffer in original_layer.named_buffers(recurse=False):
            # Replace instead of copying: the buffer may be a view that cannot be written to.
            layer._buffers[name] = buffer.clone()
        if not type(original_layer).__module__.startswith("torch."):
            plain_values = {
                name: value
                for name, value in vars(original_layer).items()
                if isinstance(value, _PLAIN) and name != "training"
            }
            vars(layer).update(plain_values)


_PLAIN = (int, float, str, bool, type(None))
