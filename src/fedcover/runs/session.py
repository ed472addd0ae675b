"""A run on its way: its state, its figures, and its folder, in which the last complete round is safe."""

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
from fedcover.models.norms import running
from fedcover.runs import checkpoints, released_rounds
from fedcover.runs.experiment import Experiment
from fedcover.runs.metrics_log import Metrics
from fedcover.runs.run_folder import Folder
from fedcover.server.round import RoundReport, initial_state
from fedcover.server.round_setup import Setup
from fedcover.types import Params, State


@dataclass(slots=True, eq=False)
class RunSession:
    """Where a run is between its first round and its last; without a folder it is only remembered.

    Files are written by a thread of their own. On a GPU, which leaves the processor to it, the next round begins
    meanwhile; else the run waits for them.
    """

    experiment: Experiment
    setup: Setup
    state: State
    metrics_in_memory: Metrics
    folder: Folder | None = None
    diverged: str = ""
    saved: int = field(init=False)
    _writing: Future[None] | None = field(init=False, default=None)
    _cpu_copy: tuple[State, State] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.saved = self.state.round
        if self.folder:
            self.metrics_in_memory = []  # they are in its folder: a run of many rounds and clients must not grow in memory

    @property
    def metrics(self) -> Metrics:
        """The figures of the rounds that are done."""
        self._wait()
        return self.folder.metrics(self.state.round) if self.folder else self.metrics_in_memory

    @property
    def running(self) -> bool:
        """Whether there are rounds to come."""
        return not self.diverged and self.state.round < self.setup.rounds

    def record_round(self, after: State, report: RoundReport) -> None:
        """Note a round that is done."""
        line = {"round": report.round, **report.metrics}
        self._wait()
        if self.folder is None:
            self.metrics_in_memory.append(line)
            self.state = after
            return
        # with privacy always: a round that is run again would release noise that nobody counts
        every = 1 if self.setup.privacy else self.experiment.checkpoint_every
        due = after.round % every == 0 or after.round == self.setup.rounds
        on_gpu = any(tensor.is_cuda for tensor in after.params.values())
        fetch = on_gpu and (due or self.folder.keeps(after.round))
        # fetched here: another thread must not disturb what is captured meanwhile
        kept = checkpoints.copy_to_cpu(after, self._cpu_copy) if fetch else after
        self._cpu_copy = (after, kept) if fetch else self._cpu_copy
        written = self.folder, line, kept, due
        try:
            self._writing = _writer().submit(self._write, *written)
        except RuntimeError:  # the main thread has ended, so no other is lent any more
            self._write(*written)
        self.state = after  # not before: `checkpoint_on_exit` would write a state whose line and kept state nobody writes
        if not on_gpu or self.setup.privacy:
            self._wait()

    def finish(self) -> None:
        """The last round is done."""
        if self.folder:
            self.folder.finish(self.metrics)

    @contextmanager
    def checkpoint_on_exit(self) -> Iterator[None]:
        """Whatever stops what is done here, the last complete round is on disk."""
        try:
            yield
            self._wait()
        except BaseException:
            self._wait()  # if nothing can be written, that is what must be told
            if self.folder and self.state.round > self.saved:
                self._save(self.folder, self.state)
            raise

    def _wait(self) -> None:
        """Until the files of the round before are on disk; what went wrong there is raised here, again and again."""
        if self._writing:
            self._writing.result()

    def _write(self, folder: Folder, line: dict[str, Any], state: State, due: bool) -> None:
        if self.setup.privacy:
            released_rounds.write_round(folder, line, state)
            self.saved = state.round
            return
        folder.append(line)
        folder.keep(
            state
        )  # before the checkpoint: a run that goes on from that would not come here again
        if due:
            self._save(folder, state)

    def _save(self, folder: Folder, state: State) -> None:
        folder.checkpoint(state)
        self.saved = state.round


@cache
def _writer() -> ThreadPoolExecutor:
    """The thread that writes the files of this process's runs."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="fedcover-files")


os.register_at_fork(
    after_in_child=_writer.cache_clear
)  # a forked process has the executor, but not its thread


def check_same_model(folder: Folder, setup: Setup, state: State) -> None:
    """Complain if a state is of another model than the one here: a module, or the code that builds one, may change."""
    there, here = (
        shapes_by_name(state.params),
        shapes_by_name(dict(setup.task.model.module.named_parameters())),
    )
    for name in [*there, *here]:
        if there.get(name) != here.get(name):
            told = (
                f"has the shape {there[name]}, not {here.get(name, 'there')}"
                if name in there
                else "is missing"
            )
            raise RunError(f"{folder.path} was made with another model: its {name!r} {told}")
    complaint = state_mismatch(setup, state)
    if complaint:
        raise RunError(
            f"{folder.path} was not written by this experiment: its checkpoint's {complaint}"
        )


def state_mismatch(setup: Setup, state: State) -> str:
    """What of a state, whose parameters have the model's shapes, no run of this experiment could have written."""
    module = setup.task.model.module
    if state.round > setup.rounds:
        return f"round is {state.round}, and the experiment has {setup.rounds}"
    for name, tensor in module.named_parameters():
        if state.params[name].dtype != tensor.dtype:
            return f"parameter {name!r} is of {state.params[name].dtype}, not {tensor.dtype}"
    params, statistics = shapes_by_name(state.params), shapes_by_name(running(module))
    for key, measured in state.measured.items():
        if not shapes_by_name(measured).items() <= params.items():
            return f"measurements {key!r} are not of this model's parameters"
    for kind, trees, shapes in (
        ("statistics", state.statistics, statistics),
        ("server state", state.server, params),
    ):
        for key, tensors in trees.items():
            if shapes_by_name(tensors) != shapes:
                return f"{kind} {key!r} is not of this model"
    counted = [(counts, (torch.uint8, torch.int32)) for counts in state.coverage.window] + [
        (state.coverage.ever, (torch.bool,))
    ]
    for counts, dtypes in counted:
        if counts and (
            shapes_by_name(counts) != params or any(t.dtype not in dtypes for t in counts.values())
        ):
            return "counts are not of this model's parameters"
    return ""


def shapes_by_name(params: Params) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name."""
    return {name: tuple(tensor.shape) for name, tensor in params.items()}


def load_latest(
    folder: Folder, setup: Setup, device: str, complain: Callable[[str], None]
) -> tuple[State, Metrics]:
    """The newest whole state of a run folder (the first one, if there is none yet) and the figures up to it."""
    if not checkpoints.found(folder.checkpoints):  # stopped before the first round was done
        state = initial_state(setup)
        if setup.privacy:
            released_rounds.check_resumable(folder, state)
        folder.keep(state)
    else:
        state, complaints = checkpoints.newest(folder.checkpoints, folder.experiment.digest, device)
        check_same_model(folder, setup, state)
        if setup.privacy:
            released_rounds.check_resumable(folder, state)
            released_rounds.finish_last_round(folder, state)
        for path, complaint in complaints.items():
            complain(f"{complaint}; going on from the older checkpoint of round {state.round}")
            checkpoints.set_aside(path)
    checkpoints.thin_out(folder.checkpoints)
    metrics = folder.truncate_metrics(state.round)
    lost = sorted(set(range(state.round)) - {line["round"] for line in metrics})
    if lost and not metrics and state.round == setup.rounds:
        raise RunError(
            f"{folder.path / 'metrics.jsonl'} has lost the figures of all {state.round} rounds, and there is none left "
            f"to run; the model is whole: fedcover export {shlex.quote(str(folder.path))}"
        )
    if lost:
        complain(
            f"{folder.path / 'metrics.jsonl'} lacks the rounds {lost}; the summary will lack them too"
        )
    return state, metrics
