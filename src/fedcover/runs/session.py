"""A run in progress: its state and metrics, saved so that the last finished round survives."""

import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from fedcover.errors import RunError
from fedcover.models.norms import running_statistics
from fedcover.runs import checkpoints, released_rounds
from fedcover.runs.experiment import Experiment
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.run_folder import Folder
from fedcover.server.round import RoundReport, initial_state
from fedcover.server.round_cache import RoundCache
from fedcover.server.round_setup import Setup
from fedcover.types import Params, State

_COUNT_DTYPES = (torch.uint8, torch.int32)


@dataclass(slots=True, eq=False)
class RunSession:
    """A run between its first round and its last, in a folder or only in memory.

    A separate thread writes the files. On a GPU the next round begins meanwhile. On a CPU the
    run waits for the files, because the thread would compete for the processor.
    """

    experiment: Experiment
    setup: Setup
    state: State
    metrics_in_memory: Metrics
    folder: Folder | None = None
    diverged: str = ""
    cache: RoundCache = field(init=False)
    saved_round: int = field(init=False)
    _pending_write: Future[None] | None = field(init=False, default=None)
    _cpu_copy: tuple[State, State] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.cache = RoundCache.of(self.setup)
        self.saved_round = self.state.round
        if self.folder:
            # the folder has them: memory must not grow with the rounds
            self.metrics_in_memory = []

    @property
    def metrics(self) -> Metrics:
        """The metrics of the finished rounds."""
        self._wait()
        return self.folder.metrics(self.state.round) if self.folder else self.metrics_in_memory

    @property
    def running(self) -> bool:
        """Whether any rounds remain."""
        return not self.diverged and self.state.round < self.setup.experiment.rounds

    def record_round(self, next_state: State, report: RoundReport) -> None:
        """Record a finished round: its metrics, and its state when a checkpoint is due."""
        line = {"round": report.round, **report.metrics}
        self._wait()
        if self.folder is None:
            self.metrics_in_memory.append(line)
            self.state = next_state
            return
        due = self._checkpoint_due(next_state.round)
        on_gpu = any(tensor.is_cuda for tensor in next_state.params.values())
        saved_state = next_state
        if on_gpu and (due or self.folder.keeps(next_state.round)):
            # copied in this thread: another one must not disturb a CUDA graph capture
            saved_state = checkpoints.copy_to_cpu(next_state, self._cpu_copy)
            self._cpu_copy = (next_state, saved_state)
        self._submit_write(self.folder, line, saved_state, due)
        # only now: `checkpoint_on_exit` must not save a state whose write was never submitted
        self.state = next_state
        if not on_gpu or self.setup.privacy:
            self._wait()

    def finish(self) -> None:
        """Write the summary after the last round."""
        if self.folder:
            self.folder.finish(self.metrics)

    @contextmanager
    def checkpoint_on_exit(self) -> Iterator[None]:
        """Save the last finished round if the block ends early, for any reason."""
        try:
            yield
            self._wait()
        except BaseException:
            self._wait()  # an error in writing is more important than the one that ends the run
            if self.folder and self.state.round > self.saved_round:
                self._save(self.folder, self.state)
            raise

    def _checkpoint_due(self, round: int) -> bool:
        """Return whether the state at the beginning of a round is to be saved.

        A private run saves every round: running one again would release noise uncounted.
        """
        every = 1 if self.setup.privacy else self.experiment.checkpoint_every
        return round % every == 0 or round == self.setup.experiment.rounds

    def _submit_write(self, folder: Folder, line: dict[str, Any], state: State, due: bool) -> None:
        """Let the writer thread write the files of a round."""
        try:
            self._pending_write = _writer().submit(self._write, folder, line, state, due)
        except RuntimeError:  # after the main thread has ended, no other can be started
            self._write(folder, line, state, due)

    def _wait(self) -> None:
        """Wait for the files of the previous round; raise its error, every time."""
        if self._pending_write:
            self._pending_write.result()

    def _write(self, folder: Folder, line: dict[str, Any], state: State, due: bool) -> None:
        if self.setup.privacy:
            released_rounds.write_round(folder, line, state)
            self.saved_round = state.round
            return
        folder.append(line)
        # before the checkpoint: a run resumed from that would not come back to this round
        folder.keep(state)
        if due:
            self._save(folder, state)

    def _save(self, folder: Folder, state: State) -> None:
        folder.checkpoint(state)
        self.saved_round = state.round


@cache
def _writer() -> ThreadPoolExecutor:
    """Return the thread that writes the files of all runs in this process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="fedcover-files")


# a forked process inherits the executor, but not its thread
os.register_at_fork(after_in_child=_writer.cache_clear)


def check_same_model(folder: Folder, setup: Setup, state: State) -> None:
    """Raise if a state belongs to another model: the code that builds one may have changed."""
    saved_shapes = shapes_by_name(state.params)
    current_shapes = shapes_by_name(dict(setup.task.model.module.named_parameters()))
    for name in [*saved_shapes, *current_shapes]:
        saved, current = saved_shapes.get(name), current_shapes.get(name)
        if saved == current:
            continue
        if saved is None:
            difference = "is missing"
        elif current is None:
            difference = f"has the shape {saved}, not there"
        else:
            difference = f"has the shape {saved}, not {current}"
        raise RunError(f"{folder.path} was made with another model: its {name!r} {difference}")
    mismatch = state_mismatch(setup, state)
    if mismatch:
        raise RunError(
            f"{folder.path} was not written by this experiment: its checkpoint's {mismatch}"
        )


def state_mismatch(setup: Setup, state: State) -> str:
    """Describe what in a state no run of this experiment could have written, or return "".

    The parameters must already have the shapes of the model.
    """
    module = setup.task.model.module
    if state.round > setup.experiment.rounds:
        return f"round is {state.round}, and the experiment has {setup.experiment.rounds}"
    for name, tensor in module.named_parameters():
        if state.params[name].dtype != tensor.dtype:
            return f"parameter {name!r} is of {state.params[name].dtype}, not {tensor.dtype}"
    return _mismatch_of_extras(state, module) or _mismatch_of_counts(state)


def _mismatch_of_extras(state: State, module: torch.nn.Module) -> str:
    """Describe measurements, statistics or server state that do not fit the model."""
    param_shapes = shapes_by_name(state.params)
    for key, measured in state.measured.items():
        if not shapes_by_name(measured).items() <= param_shapes.items():
            return f"measurements {key!r} are not of this model's parameters"
    for key, statistics in state.statistics.items():
        if shapes_by_name(statistics) != shapes_by_name(running_statistics(module)):
            return f"statistics {key!r} is not of this model"
    for key, slots in state.server.items():
        if shapes_by_name(slots) != param_shapes:
            return f"server state {key!r} is not of this model"
    return ""


def _mismatch_of_counts(state: State) -> str:
    """Describe coverage counts that do not fit the parameters."""
    param_shapes = shapes_by_name(state.params)
    dtypes_of_counts: list[tuple[Params, tuple[torch.dtype, ...]]] = [
        (counts, _COUNT_DTYPES) for counts in state.coverage.window
    ]
    dtypes_of_counts.append((state.coverage.ever, (torch.bool,)))
    for counts, dtypes in dtypes_of_counts:
        if not counts:
            continue
        wrong_dtype = any(tensor.dtype not in dtypes for tensor in counts.values())
        if wrong_dtype or shapes_by_name(counts) != param_shapes:
            return "counts are not of this model's parameters"
    return ""


def shapes_by_name(params: Params) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in params.items()}


def load_latest(
    folder: Folder, setup: Setup, device: str, complain: Callable[[str], None]
) -> tuple[State, Metrics]:
    """Return the newest intact state of a run folder, and the metrics up to it.

    A run that was stopped before its first checkpoint starts from the initial state.
    """
    if checkpoints.list_checkpoints(folder.checkpoints):
        state = _load_newest_state(folder, setup, device, complain)
    else:
        state = initial_state(setup)
        if setup.privacy:
            released_rounds.check_resumable(folder, state)
        folder.keep(state)
    checkpoints.thin_out(folder.checkpoints)
    metrics = folder.truncate_metrics(state.round)
    _report_lost_rounds(folder, setup, state, metrics, complain)
    return state, metrics


def _load_newest_state(
    folder: Folder, setup: Setup, device: str, complain: Callable[[str], None]
) -> State:
    """Load the newest intact checkpoint, and set damaged newer ones aside."""
    digest = folder.experiment.digest
    state, damages = checkpoints.load_newest(folder.checkpoints, digest, device)
    check_same_model(folder, setup, state)
    if setup.privacy:
        released_rounds.check_resumable(folder, state)
        released_rounds.finish_last_round(folder, state)
    for path, damage in damages.items():
        complain(f"{damage}; continuing from the older checkpoint of round {state.round}")
        checkpoints.set_aside(path)
    return state


def _report_lost_rounds(
    folder: Folder,
    setup: Setup,
    state: State,
    metrics: Metrics,
    complain: Callable[[str], None],
) -> None:
    """Complain about rounds without metrics; raise if none are left to summarise."""
    lost = sorted(set(range(state.round)) - {line["round"] for line in metrics})
    path = folder.path / "metrics.jsonl"
    if lost and not metrics and state.round == setup.experiment.rounds:
        raise RunError(
            f"{path} has lost the metrics of all {state.round} rounds, and there is none left to "
            f"run; the model is intact: fedcover export {shlex.quote(str(folder.path))}"
        )
    if lost:
        complain(f"{path} lacks the rounds {lost}; the summary will lack them too")
