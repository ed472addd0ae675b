"""A run on its way: its state, its figures, and its folder, in which the last complete round is safe."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedcover import checkpoints
from fedcover.experiment import Experiment
from fedcover.folders import Folder
from fedcover.rounds import Report, Setup, first_state
from fedcover.summary import Metrics
from fedcover.types import State


@dataclass(slots=True, eq=False)
class Course:
    """Where a run is between its first round and its last; without a folder it is only remembered."""

    experiment: Experiment
    setup: Setup
    state: State
    remembered: Metrics
    folder: Folder | None = None
    diverged: str = ""
    saved: int = field(init=False)

    def __post_init__(self) -> None:
        self.saved = self.state.round
        if self.folder:
            self.remembered = []  # they are in its folder: a run of many rounds and clients must not grow in memory

    @property
    def metrics(self) -> Metrics:
        """The figures of the rounds that are done."""
        return self.folder.metrics(self.state.round) if self.folder else self.remembered

    @property
    def running(self) -> bool:
        """Whether there are rounds to come."""
        return not self.diverged and self.state.round < self.setup.rounds

    def take(self, after: State, report: Report) -> None:
        """Note a round that is done."""
        line = {"round": report.round, **report.metrics}
        if self.folder:
            self.folder.append(line)
        else:
            self.remembered.append(line)
        self.state = after
        if self.folder:
            self.folder.keep(after)  # before the checkpoint: a run that goes on from that would not come here again
            # with privacy always: a round that is run again would release noise that nobody counts
            every = 1 if self.setup.privacy else self.experiment.checkpoint_every
            if after.round % every == 0 or not self.running:
                self._save()

    def finish(self) -> None:
        """The last round is done."""
        if self.folder:
            self.folder.finish(self.metrics)

    @contextmanager
    def kept_safe(self) -> Iterator[None]:
        """Whatever stops what is done here, the last complete round is on disk."""
        try:
            yield
        except BaseException:
            if self.folder and self.state.round > self.saved:
                self._save()
            raise

    def _save(self) -> None:
        assert self.folder is not None
        self.folder.checkpoint(self.state)
        self.saved = self.state.round


def where_it_stopped(
    folder: Folder, setup: Setup, device: str, complain: Callable[[str], None]
) -> tuple[State, Metrics]:
    """The newest whole state of a run folder (the first one, if there is none yet) and the figures up to it."""
    if not checkpoints.found(folder.checkpoints):  # stopped before the first round was done
        state = first_state(setup)
        folder.keep(state)
    else:
        state, complaints = checkpoints.newest(folder.checkpoints, folder.experiment.digest, device)
        for path, complaint in complaints.items():
            complain(f"{complaint}; going on from the older checkpoint of round {state.round}")
            checkpoints.set_aside(path)
    metrics = folder.cut_metrics(state.round)
    lost = sorted(set(range(state.round)) - {line["round"] for line in metrics})
    if lost:
        complain(f"{folder.path / 'metrics.jsonl'} lacks the rounds {lost}; the summary will lack them too")
    return state, metrics
