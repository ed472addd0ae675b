"""The deployment page works as it is written: its commands are run one after another, on this
machine.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from fedcover.flower.local_federation import LocalFederation, free_port, run_local_federation
from fedcover.host.orphans import descendants
from tests.helpers.repository import ROOT
from tests.system.harness import PATIENCE, alive, wait_for


def test_deploy_page_commands_run_end_to_end(tmp_path):
    """Certificates, registered nodes, a stranger that is refused, a run, and the end of all
    processes.
    """
    page = (ROOT / "docs" / "deploy.md").read_text()
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for port in ("9443", "9194", "9195", "9196"):  # so that two of these tests do not meet
        assert port in commands
        commands = commands.replace(port, str(free_port()))
    (tmp_path / "fedcover").write_text(f'#!/bin/sh\nexec {sys.executable} -m fedcover "$@"\n')
    (tmp_path / "fedcover").chmod(0o755)
    script = subprocess.Popen(
        ["bash", "-e", "-c", f"{commands}\nwait"],
        cwd=tmp_path,
        env=environment(tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    family: set[int] = set()
    try:
        wait_for(
            lambda: family.update(descendants([script.pid])) or script.poll() is not None,
            "the script's end",
        )
        output, _ = script.communicate(timeout=PATIENCE)
    finally:
        for pid in alive(family):
            os.kill(pid, 9)
    assert "the stranger was refused" in output, output
    refusal = (tmp_path / "stranger.log").read_text()
    assert "[code: 2004]" in refusal, refusal  # by the SuperLink, and not for another reason
    assert (
        len((tmp_path / "runs" / "experiment" / "metrics.jsonl").read_text().splitlines()) == 2
    ), output
    recorded = (tmp_path / "runs" / "experiment" / "experiment.toml").read_text()
    assert 'fleet = "4x1 + 4x0.5"' in recorded  # as the nodes declared
    assert "2/2" in output or "finished" in output, output


def environment(folder: Path) -> dict[str, str]:
    credentials = LocalFederation(folder).environment("admin")
    return {**credentials, "PATH": f"{folder}{os.pathsep}{credentials['PATH']}"}


def test_flwr_run_accepts_the_example(tmp_path):
    """A user's Flower app, with our strategy and our client app."""
    configs = [
        {"partition-id": place, "num-partitions": 2, "capacity": [1.0, 0.5][place]}
        for place in range(2)
    ]
    with (
        run_local_federation(tmp_path / "flower", configs) as federation,
        (tmp_path / "log.txt").open("wb") as out,
    ):
        federation.submit(ROOT / "examples" / "flower_app", out).wait(PATIENCE)
    output = (tmp_path / "log.txt").read_text()
    accuracy = re.search(r"covered: accuracy ([0-9.]+)", output)
    assert accuracy, output
    assert float(accuracy[1]) > 0.8
    assert output.count("'answered': 2, 'rejected': 0") == 3


def test_own_app_refuses_oversized_replies(tmp_path):
    """A node of the example's federation sends far too much: refused by its size, and the others
    train on.
    """
    from tests.system.handmade import HandMade, oversized

    with (
        run_local_federation(
            tmp_path / "flower", [{"partition-id": 0, "num-partitions": 2}]
        ) as federation,
        (tmp_path / "log.txt").open("wb") as out,
    ):
        evil = HandMade(
            federation.address, {"partition-id": 1, "num-partitions": 2}, [oversized] * 3
        )
        evil.start()
        time.sleep(5)  # so that it is there when the first round begins
        try:
            federation.submit(ROOT / "examples" / "flower_app", out).wait(PATIENCE)
        finally:
            evil.stop()
    output = (tmp_path / "log.txt").read_text()
    assert "too large" in output, output
    assert "'answered': 1, 'rejected': 1" in output, output
    assert re.search(r"covered: accuracy ([0-9.]+)", output), output
