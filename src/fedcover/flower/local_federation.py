"""A federation on this machine: a SuperLink and SuperNodes as processes that end with it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import tomli_w

from fedcover.errors import RunError
from fedcover.host.orphans import descendants, lifeline_arguments, send_signal

FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
"""No calls home, no installation of packages, and no wait of a second before each task."""
CONNECTION = "fedcover"
_ESCAPE = re.compile(r"\\.")
STEADY_LAUNCHER = ("-m", "fedcover.flower.steady")
"""Runs one of Flower's programs so that it ends with the process that started it."""
FLWR = (sys.executable, "-P", "-m", "fedcover.host.orphans", "flwr.cli.app:app")
"""Runs Flower's command `flwr` so that it ends with the process that started it."""
START_TIMEOUT, STOP_TIMEOUT = 60.0, 10.0
"""Seconds that a process has to start, and to end by itself."""


@dataclass
class LocalFederation:
    """A SuperLink and its SuperNodes; every process has its own home and log below `folder`."""

    folder: Path
    python_path: Sequence[str] = ()
    port: int = field(default_factory=lambda: free_port())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Return the address of the SuperLink."""
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink, and wait until it listens."""
        options = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        options += ["--disable-runtime-dependency-installation"]
        process = self.start(
            "superlink", sys.executable, *STEADY_LAUNCHER, "flower-superlink", *options
        )
        self.wait_until_listening("superlink", self.port)
        return process

    def start_supernode(self, name: str, config: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a SuperNode with a configuration."""
        options = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        options += ["--insecure", "--node-config", node_config_argument(config)]
        return self.start(name, sys.executable, *STEADY_LAUNCHER, "flower-supernode", *options)

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one of Flower's programs with its output in its log."""
        with self.log(name).open("ab") as out:
            return self._start_process(name, [program_path(program), *arguments], out)

    def submit(self, app: Path, out: IO[bytes]) -> subprocess.Popen[bytes]:
        """Run a Flower App on the federation; the process ends when the run does."""
        connection = {"address": self.address, "insecure": True}
        flower_config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        (self.home("submit") / "config.toml").write_text(tomli_w.dumps(flower_config))
        command = [*FLWR, "run", str(app), CONNECTION, "--stream"]
        return self._start_process("submit", command, out)

    def _start_process(
        self, name: str, command: Sequence[str], out: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            start_new_session=True,
            **lifeline_arguments(self.environment(name)),
        )
        self.processes[name] = process
        return process

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process, with the paths of the user's own modules."""
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        # absolute, as the process runs in another folder
        python_path = [*self.python_path, *(os.path.abspath(path) for path in inherited if path)]
        search_path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        return {
            **os.environ,
            **FLOWER_ENVIRONMENT,
            "FLWR_HOME": str(self.home(name)),
            "PATH": os.pathsep.join(search_path),
            "PYTHONPATH": os.pathsep.join(python_path),
        }

    def home(self, name: str) -> Path:
        """Return a process's own folder, so that no two processes unpack an app into one place."""
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.home(name) / "log.txt"

    def wait_until_listening(self, name: str, port: int) -> None:
        """Wait until a process accepts connections; raise a RunError if it does not."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunError(f"{name} did not start: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        """Return the end of a process's log."""
        return self.log(name).read_text(errors="replace")[-1000:].strip() or "its log is empty"

    def stop(self, *names: str) -> None:
        """End processes and all that they started: by SIGTERM first, then by SIGKILL."""
        processes = [self.processes.pop(name) for name in names or list(self.processes)]
        pids = {process.pid for process in processes}
        children = descendants(list(pids))
        for process in processes:
            send_signal(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(0.05)
        children |= descendants(children | pids)
        still_running = {process.pid for process in processes if process.poll() is None}
        for pid in children | still_running:
            send_signal(pid, signal.SIGKILL)
        for process in processes:
            process.wait()

    def kill(self, name: str) -> None:
        """Kill a process and all that it started at once, as a power cut would."""
        process = self.processes.pop(name)
        for pid in descendants([process.pid]) | {process.pid}:
            send_signal(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def run_local_federation(
    folder: Path, nodes: Sequence[Mapping[str, object]], python_path: Sequence[str] = ()
) -> Iterator[LocalFederation]:
    """Start a SuperLink and a SuperNode for each configuration; stop them at the end."""
    federation = LocalFederation(folder, python_path)
    try:
        federation.start_superlink()
        for partition_id, config in enumerate(nodes):
            federation.start_supernode(f"supernode-{partition_id}", config)
        yield federation
    finally:
        federation.stop()


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program_path(name: str) -> str:
    """Return the path of one of Flower's programs, which are installed next to Python."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


def node_config_argument(config: Mapping[str, object]) -> str:
    """Return a node's configuration as one argument: `key=value` pairs with values as in TOML.

    Flower ends a text at the next quote, even after a backslash: quotes are written as numbers.

    >>> print(node_config_argument({"rows": 'my "own".npz', "partition-id": 2}))
    rows="my \\u0022own\\u0022.npz" partition-id=2
    """
    pairs = tomli_w.dumps(config).rstrip("\n").split("\n")
    return " ".join(_ESCAPE.sub(_number_quotes, pair).replace(" = ", "=", 1) for pair in pairs)


def _number_quotes(escape: re.Match[str]) -> str:
    return r"\u0022" if escape[0] == r"\"" else escape[0]
