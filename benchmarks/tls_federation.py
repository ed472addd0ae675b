"""A federation on this machine with TLS and keys, set up by the commands of `docs/deploy.md`."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedcover.flower.local_federation import STEADY_LAUNCHER, LocalFederation, free_port

DEPLOY_PAGE = Path(__file__).parent.parent / "docs" / "deploy.md"


@dataclass
class TLSFederation(LocalFederation):
    """A SuperLink with a database, TLS and registered keys, and its SuperNodes."""

    def prepare(self) -> None:
        """Make the certificates, and write the administrator's `config.toml`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_command("bash", "-e", "-c", _certificate_commands())
        (self.home("admin") / "config.toml").write_text(
            f'[superlink]\ndefault = "fleet"\n\n[superlink.fleet]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.folder}/ca.crt"\n'
        )

    def run_command(self, *command: str) -> None:
        """Run a command of the administrator's to its end."""
        environment = {**self.environment("admin"), "SERVER": "127.0.0.1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, check=False
        )
        if done.returncode:
            summary = " ".join(command)[:60]
            raise SystemExit(f"{summary} has failed: {done.stdout!r} {done.stderr!r}")

    def start_superlink(self, *, wait: bool = True) -> subprocess.Popen[bytes]:
        """Start the SuperLink, and wait until it listens."""
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        authentication = ["--enable-supernode-auth", "--database", "link.db"]
        certificates = [
            *("--ssl-ca-certfile", "ca.crt"),
            *("--ssl-certfile", "server.pem"),
            *("--ssl-keyfile", "server.key"),
        ]
        options = [*address, *authentication, *certificates]
        options.append("--disable-runtime-dependency-installation")
        process = self.start(
            "superlink", sys.executable, *STEADY_LAUNCHER, "flower-superlink", *options
        )
        if wait:
            self.wait_until_listening("superlink", self.port)
        return process

    def register(self, name: str) -> None:
        """Make a node's key, and register it at the SuperLink."""
        key = ["-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key"]
        self.run_command("ssh-keygen", "-q", *key)
        self.run_command("flwr", "supernode", "register", f"{name}.key.pub", "fleet")

    def start_supernode(self, name: str, config: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a SuperNode whose key is registered."""
        superlink = ["--superlink", self.address, "--root-certificates", "ca.crt"]
        key = ["--auth-supernode-private-key", f"{name}.key"]
        address = ["--host", "127.0.0.1", "--port", str(free_port())]
        node_config = " ".join(f"{key}={value}" for key, value in config.items())
        options = [*superlink, *key, *address, "--node-config", node_config]
        return self.start(name, sys.executable, *STEADY_LAUNCHER, "flower-supernode", *options)

    def start_run(
        self, experiment_file: str, nodes: int, *, resume: bool
    ) -> subprocess.Popen[bytes]:
        """Start or resume a run as the administrator does."""
        options = [experiment_file, "fleet", "--nodes", str(nodes), *(["--resume"] * resume)]
        return self.start("admin", sys.executable, "-m", "fedcover", "flower", "run", *options)


def _certificate_commands() -> str:
    """Return the commands of `docs/deploy.md` that make the certificates."""
    block = re.search(
        r"^```bash\n(openssl .*?)^```", DEPLOY_PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    return block[1]
