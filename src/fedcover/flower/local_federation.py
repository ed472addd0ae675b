"""A federation on this machine: a SuperLink and SuperNodes as processes, and nothing of them left afterwards."""

import os
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

from fedcover.errors import InvalidValue, RunError
from fedcover.host.orphans import descendants, lifeline_arguments, send_signal

FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
"""No calls home, no packages installed behind anybody's back, and no second lost before each task."""
CONNECTION = "fedcover"
STEADY_LAUNCHER = ("-m", "fedcover.flower.steady")
"""Runs a program of Flower's so that it does not let garbage lie."""
FLWR = (sys.executable, "-P", "-m", "fedcover.host.orphans", "flwr.cli.app:app")
"""Runs Flower's command `flwr` so that it ends with the process that has started it."""
STARTING, STOPPING = 60.0, 10.0
"""Seconds that a process has to come up, and to end by itself."""


@dataclass
class LocalFederation:
    """A SuperLink and its SuperNodes; every process has its own home and log below `folder`."""

    folder: Path
    python_path: Sequence[str] = ()
    port: int = field(default_factory=lambda: free_port())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it listens."""
        arguments = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--disable-runtime-dependency-installation"]
        started = self.start(
            "superlink", sys.executable, *STEADY_LAUNCHER, "flower-superlink", *arguments
        )
        self.wait_until_listening("superlink", self.port)
        return started

    def start_supernode(self, name: str, config: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a SuperNode with a configuration."""
        told = " ".join(f"{key}={_toml(value)}" for key, value in config.items())
        arguments = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        arguments += ["--insecure", "--node-config", told]
        return self.start(name, sys.executable, *STEADY_LAUNCHER, "flower-supernode", *arguments)

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one of Flower's programs; what it says goes into its log."""
        with self.log(name).open("ab") as out:
            started = subprocess.Popen(
                [path_of(program), *arguments], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self.folder, start_new_session=True, **lifeline_arguments(self.environment(name)),
            )  # fmt: skip
        self.processes[name] = started
        return started

    def submit(self, app: Path, out: IO[bytes]) -> subprocess.Popen[bytes]:
        """Run a Flower App on the federation; the process ends when the run does."""
        home = self.home("submit")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n'
            "insecure = true\n"
        )
        started = subprocess.Popen(
            [*FLWR, "run", str(app), CONNECTION, "--stream"], stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True, **lifeline_arguments(self.environment("submit")),
        )  # fmt: skip
        self.processes["submit"] = started
        return started

    def environment(self, name: str) -> dict[str, str]:
        """What a process is told: Flower without calls home, and where the user's own modules are."""
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [
            *self.python_path,
            *(os.path.abspath(path) for path in known if path),
        ]  # it runs in another folder
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {
            **os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(self.home(name)), "PATH": beside,
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip

    def home(self, name: str) -> Path:
        """A process's own folder: two that unpack the same app into one would disturb each other."""
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def log(self, name: str) -> Path:
        """What a process says."""
        return self.home(name) / "log.txt"

    def wait_until_listening(self, name: str, port: int) -> None:
        """Wait until a process accepts connections."""
        end = time.monotonic() + STARTING
        while time.monotonic() < end:
            if self.processes[name].poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunError(f"{name} did not start: {self.log_tail(name)}")

    def log_tail(self, name: str) -> str:
        """The end of a process's log."""
        return self.log(name).read_text(errors="replace")[-1000:].strip() or "it said nothing"

    def serverapp_is_running(self) -> bool:
        """Whether there is a process in which the SuperLink's run is made."""
        commands = (_command(pid) for pid in descendants([self.processes["superlink"].pid]))
        return any(b"flwr-serverapp" in command for command in commands)

    def stop(self, *names: str) -> None:
        """End processes and all that they have started, politely at first."""
        chosen = [self.processes.pop(name) for name in names or list(self.processes)]
        family = descendants([process.pid for process in chosen])
        for process in chosen:
            send_signal(process.pid, signal.SIGTERM)
        end = time.monotonic() + STOPPING
        while time.monotonic() < end and not all(process.poll() is not None for process in chosen):
            time.sleep(0.05)
        family |= descendants(family | {process.pid for process in chosen})
        for pid in family | {process.pid for process in chosen if process.poll() is None}:
            send_signal(pid, signal.SIGKILL)
        for process in chosen:
            process.wait()

    def kill(self, name: str) -> None:
        """End a process and all that it has started at once, as a power cut would."""
        process = self.processes.pop(name)
        for pid in descendants([process.pid]) | {process.pid}:
            send_signal(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def run_local_federation(
    folder: Path, nodes: Sequence[Mapping[str, object]], python_path: Sequence[str] = ()
) -> Iterator[LocalFederation]:
    """A SuperLink and a SuperNode for each configuration, stopped at the end, whatever happens."""
    made = LocalFederation(folder, python_path)
    try:
        made.start_superlink()
        for place, config in enumerate(nodes):
            made.start_supernode(f"supernode-{place}", config)
        yield made
    finally:
        made.stop()


def _command(pid: int) -> bytes:
    """How a process was called; nothing if it has just ended."""
    if not Path("/proc/self/cmdline").exists():
        asked = subprocess.run(
            ["ps", "-p", str(pid), "-o", "command="], capture_output=True, check=False
        )
        return asked.stdout
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def path_of(name: str) -> str:
    """One of Flower's programs: they stand beside the Python that runs this."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _toml(value: object) -> str:
    """A value of a node's configuration, in whichever quotes it does not hold: Flower knows no other way.

    >>> print(_toml("here"), _toml('a "b" c'), _toml("it's"), _toml(2))
    'here' 'a "b" c' "it's" 2
    """
    if not isinstance(value, str):
        return str(value)
    quote = next((sign for sign in "'\"" if sign not in value), None)
    if quote is None:
        raise InvalidValue(
            f"Flower takes no text with both kinds of quotes in a node's configuration; got {value!r}"
        )
    return f"{quote}{value}{quote}"
