"""Tell the SuperLink at once that its server was killed; Flower itself waits for a minute of silence.

The server holds a pipe open that a small process reads from. When the server ends in order, it says so;
when it is killed, the operating system closes the pipe, and the small process reports what has happened.
Which SuperLink, and with which right, is not public in Flower 1.41; all that is needed of it is in this file.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

KILLED = (
    "the server's process has ended without a word: somebody, or the system for lack of memory, has killed it, or the "
    "machine could not go on"
)
IN_ORDER = b"in order\n"
"""What the server writes when it ends as it should, with a result or with an error."""


@contextmanager
def reported(grid: Any) -> Iterator[None]:
    """Have the SuperLink told if this process is killed within this block."""
    if not hasattr(grid, "_token"):  # Flower's simulation has no SuperLink
        yield
        return
    told = {
        "address": grid._addr, "insecure": grid._insecure, "token": grid._token, "run": grid.run.run_id,
        "certificates": None if grid._cert is None else grid._cert.decode(),
    }  # fmt: skip
    reporter = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedcover.flower.sudden_ends"], stdin=subprocess.PIPE, bufsize=0,
        start_new_session=True,
    )  # fmt: skip
    assert reporter.stdin is not None
    with reporter:
        _say(reporter.stdin, json.dumps(told).encode() + b"\n")
        try:
            yield
        finally:
            _say(reporter.stdin, IN_ORDER)


def _say(pipe: IO[bytes], words: bytes) -> None:
    with suppress(
        BrokenPipeError
    ):  # without a reporter the run goes on, and Flower notices in its own time
        pipe.write(words)


def main() -> None:
    """Wait until the server ends, and report it unless that was in order."""
    told, said = sys.stdin.buffer.readline(), sys.stdin.buffer.read()
    if told.endswith(b"\n") and said != IN_ORDER:
        report(**json.loads(told))


def report(address: str, insecure: bool, token: str, run: int, certificates: str | None) -> None:
    """Say why the run has ended, in its log, and that it has."""
    import httpx  # not before: this process is to stay small
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
        address, insecure, None if certificates is None else certificates.encode(),
        [RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"), RuntimeTokenHttpInterceptor(token=token)],
    )  # fmt: skip
    try:
        client.PushLogs(
            PushLogsRequest(
                node=Node(node_id=0), run_id=run, logs=[f"fedcover: stopped: {KILLED}\n"]
            )
        )
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=KILLED))
    except httpx.HTTPError as error:  # the SuperLink has ended, too, or has ended the run itself
        sys.exit(f"fedcover: the SuperLink was not told that its server was killed: {error}")
    finally:
        client.close()


if __name__ == "__main__":
    main()
