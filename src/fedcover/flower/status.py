"""The status of a run's server: a file that it writes, and that `fedcover flower up` reads.

A status names the launch that it belongs to, so that it is never taken for that of an earlier run
in the same folder. The server holds a lock for as long as it lives. So a status that is not final,
without the lock, is that of a server that was killed.

`fedcover flower run` may watch a server on another machine. It learns the outcome from the line
that the server logs: its announcement.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from fedcover.errors import FedcoverError, RunError
from fedcover.host import disk, locks
from fedcover.log import log

FILE_NAME, LOCK_NAME = "status.json", ".status-lock"


class ServerState(StrEnum):
    """What a server is doing, or how its run ended."""

    STARTING = "starting"
    WAITING = "waiting for nodes"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"
    FINISHED = "finished"


FINAL_STATES = (ServerState.STOPPED, ServerState.FAILED, ServerState.FINISHED)

_ANNOUNCEMENTS = {ServerState.FINISHED: "finished: ", ServerState.FAILED: "stopped: "}
"""How the server logs an outcome."""
LOG_PREFIX = "fedcover: "
"""How a line of our log begins."""


@dataclass(frozen=True)
class Status:
    """The state of a server at one moment.

    Attributes:
        state: What the server is doing, or how its run ended.
        rounds: The number of finished rounds.
        message: Why the run has failed or was stopped.
        launch: The launch of the server, as the one who launched it has named it.
        process: The id of the server's process.
        time: When this was written, in seconds since 1970.
    """

    state: ServerState
    rounds: int = 0
    message: str = ""
    launch: str = ""
    process: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES


# ── the server's side ───────────────────────────────────────────────────────────────────────────


@dataclass
class StatusFile:
    """The status file of a server that runs."""

    folder: Path
    launch: str = ""
    rounds: int = 0

    def write(self, state: ServerState, message: str = "") -> None:
        """Replace the status.

        If it cannot be written, it is removed: none is better than an old one. The run goes on.
        """
        status = Status(state, self.rounds, message, self.launch)
        path = self.folder / FILE_NAME
        try:
            disk.write_atomically(path, (json.dumps(asdict(status), indent=2) + "\n").encode())
        except RunError as error:
            log.warning("no status file: %s", error)
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def recorded_status(folder: Path, launch: str) -> Iterator[StatusFile]:
    """Keep the status file of a server during a `with` block, and record how the block ends.

    Raises:
        RunError: If another server uses the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create the run folder {folder}: {error.strerror}") from error
    with locks.lock_folder(folder, LOCK_NAME):
        status = StatusFile(folder, launch)
        status.write(ServerState.STARTING)
        try:
            yield status
        except FedcoverError as error:
            status.write(ServerState.FAILED, str(error))
            raise
        except Exception as error:
            status.write(
                ServerState.FAILED, f"an unexpected error: {type(error).__name__}: {error}"
            )
            raise
        except BaseException:
            status.write(ServerState.STOPPED, "the server was told to stop")
            raise
        else:
            status.write(ServerState.FINISHED)
        finally:
            if not launch:
                remove_lone_status(folder)


def remove_lone_status(folder: Path) -> None:
    """Remove the folder of a run that has not even begun: it holds a status and nothing else."""
    with suppress(OSError):
        if set(os.listdir(folder)) <= {FILE_NAME, LOCK_NAME}:
            shutil.rmtree(folder)


def announcement(state: ServerState, message: str) -> str:
    """Return the message with which a server logs an outcome.

    >>> announcement(ServerState.FAILED, "no room")
    'stopped: no room'
    """
    return _ANNOUNCEMENTS[state] + message


# ── the reader's side ───────────────────────────────────────────────────────────────────────────


def read_status(folder: Path, launch: str) -> Status | None:
    """Return the status of a launch; None if there is no readable one."""
    try:
        fields = json.loads(disk.read_bytes(folder / FILE_NAME))
        status = Status(**{**fields, "state": ServerState(fields["state"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return status if status.launch == launch else None


def was_killed(folder: Path, launch: str) -> bool:
    """Return whether the server of a launch has gone without a final status."""
    status = read_status(folder, launch)
    if status is None or status.is_final or locks.is_locked(folder, LOCK_NAME):
        return False
    status = read_status(folder, launch)  # it may have ended since
    return status is not None and not status.is_final


def read_announcement(line: str) -> Status | None:
    """Return the outcome that a line of a server's log announces.

    Only the beginning of the line counts, as a node may have written the rest.

    >>> read_announcement("fedcover: stopped: no room").message
    'no room'
    >>> read_announcement("fedcover: round 1: client 3 rejected: its node says: 'stopped: '")
    """
    for state, beginning in _ANNOUNCEMENTS.items():
        if line.startswith(LOG_PREFIX + beginning):
            return Status(state, message=line.removeprefix(LOG_PREFIX + beginning).rstrip())
    return None


def last_announcement(lines: Iterable[str]) -> Status | None:
    """Return the last outcome that a log announces."""
    statuses = [status for line in lines if (status := read_announcement(line)) is not None]
    return statuses[-1] if statuses else None
