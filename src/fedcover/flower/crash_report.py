"""Report to the SuperLink at once that its server was killed; Flower waits for a minute of silence.

The server holds a pipe open that a small process reads from. A server that ends regularly writes a
last line. If it is killed, the operating system closes the pipe, and the small process reports it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.serverapp import Grid

KILLED = (
    "the server's process was killed: by somebody, by the system for lack of memory, "
    "or because the machine failed"
)
REGULAR_END = b"in order\n"
"""What the server writes when it ends as it should, with a result or with an error."""


@contextmanager
def report_if_killed(grid: "Grid") -> Iterator[None]:
    """Have the SuperLink notified if this process is killed within the block."""
    # not at the top, because the process that waits should stay small
    from fedcover.flower.private_api import SuperLinkAddress, superlink_of

    superlink = superlink_of(grid)
    if superlink is None:  # Flower's simulation has none
        yield
        return
    address = asdict(SuperLinkAddress.of(superlink))
    reporter = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedcover.flower.crash_report"],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert reporter.stdin is not None
    with reporter:
        _write(reporter.stdin, json.dumps(address).encode() + b"\n")
        try:
            yield
        finally:
            _write(reporter.stdin, REGULAR_END)


def _write(pipe: IO[bytes], content: bytes) -> None:
    # without a reporter the run continues, and Flower notices a kill later
    with suppress(BrokenPipeError):
        pipe.write(content)


def main() -> None:
    """Wait until the server ends, and report it unless that was regular."""
    address, last_line = sys.stdin.buffer.readline(), sys.stdin.buffer.read()
    if address.endswith(b"\n") and last_line != REGULAR_END:
        report_killed(**json.loads(address))


def report_killed(**address: Any) -> None:
    """Mark the run as failed, and write the reason into its log."""
    import httpx  # not before it is needed

    from fedcover.flower.private_api import SuperLinkAddress
    from fedcover.flower.status import LOG_PREFIX, ServerState, announcement

    line = announcement(ServerState.FAILED, KILLED)
    try:
        SuperLinkAddress(**address).mark_failed(KILLED, [f"{LOG_PREFIX}{line}\n"])
    except httpx.HTTPError as error:  # the SuperLink has ended, or has ended the run itself
        sys.exit(
            f"fedcover: the SuperLink could not be notified that its server was killed: {error}"
        )


if __name__ == "__main__":
    main()
