"""Bytes at the socket: does what a client moves follow its capacity? A counting proxy before every SuperNode.

Two SuperNodes with one client each, full width and quarter width of a WRN28-2; prints JSON. Counted is every byte that
passes the proxy, headers included, by the path of the request: only paths that carry tasks and answers count, in both
directions, from the second round on (so neither app delivery nor heartbeats, as the two nodes are compared alike).
"""

import json
import re
import socket
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

import fedcover as fc
from fedcover.flower.app_template import RunConfig, write_app
from fedcover.flower.local_federation import LocalFederation, free_port
from fedcover.runs.metrics_log import read_lines

CARRYING = (
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "confirm-message-received",
)
_REQUEST = re.compile(rb"(?:POST|GET) (\S+) HTTP/1")


def _end(connection: socket.socket) -> None:
    """Close a connection, also for whoever waits for its bytes."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Proxy:
    """Passes bytes on between a SuperNode and the SuperLink, and counts them by the path of the request."""

    def __init__(self, target: int) -> None:
        self.port, self.target = free_port(), target
        self.counted: Counter[str] = Counter()
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # the SuperLink has gone, at the end
                near.close()
                continue
            path = [""]  # of the request that is under way on this connection
            for source, sink, outgoing in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, outgoing, path), daemon=True
                ).start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, outgoing: bool, path: list[str]
    ) -> None:
        with suppress(OSError):  # an abrupt end, of either side
            while data := source.recv(2**16):
                if outgoing and (found := _REQUEST.match(data)):
                    path[0] = found[1].decode().rpartition("/")[2]
                self.counted[path[0]] += len(data)
                sink.sendall(data)
        _end(source)
        _end(sink)

    def close(self) -> None:
        """Accept no more connections; those that are open end with their processes."""
        _end(self._server)

    @property
    def carried(self) -> int:
        """Bytes of tasks and answers so far."""
        return sum(self.counted[path] for path in CARRYING)


def measure(place: Path, rounds: int = 4) -> dict[str, object]:
    """Bytes of a full-width and of a quarter-width client, round by round."""
    wanted = fc.Experiment(
        name="wire", model="wide_resnet(depth=28, widen=2)", policy="prefix", fleet="1x1.0 + 1x0.25", clients=2,
        active=2, rounds=rounds, epochs=1, batch_size=8, calibration=16, evaluate_every=rounds,
        dataset="synthetic(shape=(3, 32, 32), samples=8, test_size=16)",
    )  # fmt: skip
    federation = LocalFederation(place / "flower")
    folder = place / "run"
    marks: list[list[int]] = []
    proxies = [Proxy(federation.port) for _ in range(2)]
    try:
        federation.start_superlink()
        for number, proxy in enumerate(proxies):
            arguments = [
                "--superlink",
                f"127.0.0.1:{proxy.port}",
                "--host",
                "127.0.0.1",
                "--port",
                str(free_port()),
            ]
            config = f"partition-id={number} num-partitions=2"
            federation.start(
                f"node-{number}",
                "flower-supernode",
                "--insecure",
                *arguments,
                "--node-config",
                config,
            )
        with (place / "log.txt").open("wb") as log:
            settings = RunConfig(
                wanted.to_toml(), str(folder), device="cpu", nodes=2, deadline=600.0
            )
            process = federation.submit(write_app(place / "app", settings), log)
            while process.poll() is None:
                path = folder / "metrics.jsonl"
                done = path.read_bytes().count(b"\n") if path.exists() else 0
                if done > len(marks):
                    marks.append([proxy.carried for proxy in proxies])
                threading.Event().wait(0.05)
    finally:
        federation.stop()
        for proxy in proxies:
            proxy.close()
    moved = [
        [after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(marks)
    ]
    lines = read_lines(folder / "metrics.jsonl")
    full, quarter = (median(column) for column in zip(*moved, strict=True))
    return {
        "bytes_per_round": {
            "full width": [m[0] for m in moved],
            "quarter width": [m[1] for m in moved],
        },
        "quarter_of_full": round(quarter / full, 4),
        "bytes_of_parameters_and_masks_per_round_both_clients": lines[-1]["bytes_down"]
        + lines[-1]["bytes_up"],
        "all_bytes_by_path": [dict(proxy.counted.most_common()) for proxy in proxies],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fedcover-wire-") as folder:
        print(json.dumps(measure(Path(folder)), indent=2))
