"""Report to the SuperLink at once that its server was killed; Flower waits for a minute of silence.

The server holds a pipe open that a small process reads from. A server that ends regularly writes a
last line. If it is killed, the operating system closes the pipe, and the small process reports it.
The address and the token of the SuperLink are not public in Flower 1.41; only this file needs them.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

KILLED = (
    "the server's process was killed: by somebody, by the system for lack of memory, "
    "or because the machine failed"
)
REGULAR_END = b"in order\n"
"""What the server writes when it ends as it should, with a result or with an error."""


@contextmanager
def report_if_killed(grid: Any) -> Iterator[None]:
    """Have the SuperLink notified if this process is killed within the block."""
    if not hasattr(grid, "_token"):  # Flower's simulation has no SuperLink
        yield
        return
    superlink = {
        "address": grid._addr,
        "insecure": grid._insecure,
        "token": grid._token,
        "run": grid.run.run_id,
        "certificates": None if grid._cert is None else grid._cert.decode(),
    }
    reporter = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedcover.flower.crash_report"],
        stdin=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert reporter.stdin is not None
    with reporter:
        _write(reporter.stdin, json.dumps(superlink).encode() + b"\n")
        try:
            yield
        finally:
            _write(reporter.stdin, REGULAR_END)


def _write(pipe: IO[bytes], content: bytes) -> None:
    # without a reporter the run goes on, and Flower notices a kill later
    with suppress(BrokenPipeError):
        pipe.write(content)


def main() -> None:
    """Wait until the server ends, and report it unless that was regular."""
    superlink, last_line = sys.stdin.buffer.readline(), sys.stdin.buffer.read()
    if superlink.endswith(b"\n") and last_line != REGULAR_END:
        report_killed(**json.loads(superlink))


def report_killed(
    address: str, insecure: bool, token: str, run: int, certificates: str | None
) -> None:
    """Mark the run as failed, and write the reason into its log."""
    import httpx  # not before it is needed: this process should stay small
    from flwr.common.constant import SubStatus
    from flwr.proto.log_pb2 import PushLogsRequest
    from flwr.proto.node_pb2 import Node
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
    )
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address(
        address,
        insecure,
        None if certificates is None else certificates.encode(),
        [
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            RuntimeTokenHttpInterceptor(token=token),
        ],
    )
    log_lines = [f"fedcover: stopped: {KILLED}\n"]
    try:
        client.PushLogs(PushLogsRequest(node=Node(node_id=0), run_id=run, logs=log_lines))
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=KILLED))
    except httpx.HTTPError as error:  # the SuperLink has ended, or has ended the run itself
        sys.exit(
            f"fedcover: the SuperLink could not be notified that its server was killed: {error}"
        )
    finally:
        client.close()


if __name__ == "__main__":
    main()
