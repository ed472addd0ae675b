"""Bytes at the socket: does what a client moves follow its capacity?

Two SuperNodes have one client each, of full width and of a quarter of the width of a WRN28-2. A
proxy before every SuperNode counts every byte that passes, headers included, by the path of the
request. Only paths that carry tasks and answers count, in both directions, from the second round
on. So neither the delivery of the app nor heartbeats count. Prints JSON.
"""

import json
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
"""The paths of requests that carry tasks and answers."""
_REQUEST = re.compile(rb"(?:POST|GET) (\S+) HTTP/1")


def _end(connection: socket.socket) -> None:
    """Close a connection, also for those that wait for its bytes."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Proxy:
    """A proxy from a SuperNode to the SuperLink that counts bytes by the path of the request."""

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
            except OSError:  # the SuperLink has ended
                near.close()
                continue
            path = [""]  # of the request that this connection is serving
            for source, sink, outgoing in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._forward, args=(source, sink, outgoing, path), daemon=True
                ).start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, outgoing: bool, path: list[str]
    ) -> None:
        with suppress(OSError):  # an abrupt end of either side
            while data := source.recv(2**16):
                if outgoing and (request := _REQUEST.match(data)):
                    path[0] = request[1].decode().rpartition("/")[2]
                self.counted[path[0]] += len(data)
                sink.sendall(data)
        _end(source)
        _end(sink)

    def close(self) -> None:
        """Accept no more connections; open ones end with their processes."""
        _end(self._server)

    @property
    def carried(self) -> int:
        """Return the bytes of tasks and answers so far."""
        return sum(self.counted[path] for path in CARRYING)


@contextmanager
def run_behind_proxies(place: Path, nodes: int) -> Iterator[tuple[LocalFederation, list[Proxy]]]:
    """Start a SuperLink and SuperNodes, each behind its proxy; stop them at the end."""
    federation = LocalFederation(place / "flower")
    proxies = [Proxy(federation.port) for _ in range(nodes)]
    try:
        federation.start_superlink()
        for node, proxy in enumerate(proxies):
            superlink = ["--insecure", "--superlink", f"127.0.0.1:{proxy.port}"]
            address = ["--host", "127.0.0.1", "--port", str(free_port())]
            config = ["--node-config", f"partition-id={node} num-partitions={nodes}"]
            federation.start(f"node-{node}", "flower-supernode", *superlink, *address, *config)
        yield federation, proxies
    finally:
        federation.stop()
        for proxy in proxies:
            proxy.close()


def carried_by_round(
    process: subprocess.Popen[bytes], metrics: Path, proxies: Sequence[Proxy]
) -> list[list[int]]:
    """Wait for the end of a run; return what every proxy had carried at the end of each round."""
    carried: list[list[int]] = []
    while process.poll() is None:
        finished = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if finished > len(carried):
            carried.append([proxy.carried for proxy in proxies])
        time.sleep(0.05)
    return carried


def measure(place: Path, rounds: int = 4) -> dict[str, object]:
    """Return the bytes of a full-width and of a quarter-width client, round by round."""
    experiment = fc.Experiment(
        name="wire",
        model="wide_resnet(depth=28, widen=2)",
        policy="prefix",
        fleet="1x1.0 + 1x0.25",
        clients=2,
        active=2,
        rounds=rounds,
        epochs=1,
        batch_size=8,
        calibration=16,
        evaluate_every=rounds,
        dataset="synthetic(shape=(3, 32, 32), samples=8, test_size=16)",
    )
    folder = place / "run"
    settings = RunConfig(experiment.to_toml(), str(folder), device="cpu", nodes=2, deadline=600.0)
    with (
        run_behind_proxies(place, nodes=2) as (federation, proxies),
        (place / "log.txt").open("wb") as log,
    ):
        process = federation.submit(write_app(place / "app", settings), log)
        carried = carried_by_round(process, folder / "metrics.jsonl", proxies)
    moved = [
        [after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(carried)
    ]
    full, quarter = zip(*moved, strict=True)
    last_round = read_lines(folder / "metrics.jsonl")[-1]
    parameters_and_masks = last_round["bytes_down"] + last_round["bytes_up"]
    return {
        "bytes_per_round": {"full width": list(full), "quarter width": list(quarter)},
        "quarter_of_full": round(median(quarter) / median(full), 4),
        "bytes_of_parameters_and_masks_per_round_both_clients": parameters_and_masks,
        "all_bytes_by_path": [dict(proxy.counted.most_common()) for proxy in proxies],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="fedcover-wire-") as folder:
        print(json.dumps(measure(Path(folder)), indent=2))
