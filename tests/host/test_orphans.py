"""Processes that end with the process that has started them, however that ended."""

import os
import signal
import subprocess
import sys

import pytest

from fedcover.host.orphans import LIFELINE_VARIABLE, descendants, end_with_parent
from tests.helpers.processes import running, waited_for

PARENT = """
import os, subprocess, sys, time
from fedcover.host.orphans import lifeline_arguments
arguments = lifeline_arguments(os.environ)
subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True, **arguments)
time.sleep(600)
"""
CHILD = """
import subprocess, sys, time
from fedcover.host.orphans import end_with_parent
end_with_parent()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_and_grandchildren_end_with_the_parent(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "-c", CHILD])
    family: set[int] = set()
    try:
        assert waited_for(lambda: len(descendants([parent.pid])) == 2)
        family = descendants([parent.pid])
        assert running(family) == family  # they live while the parent does
        parent.send_signal(number)
        parent.wait()
        assert waited_for(lambda: not running(family))
    finally:
        for pid in running(family | {parent.pid}):
            os.kill(pid, signal.SIGKILL)
        parent.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_foreign_program_ends_with_the_parent(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import sys, time\ndef main():\n    print(sys.argv[1:], flush=True)\n    time.sleep(600)\n"
    )
    program = ["-P", "-m", "fedcover.host.orphans", "theirs:main", "one", "two"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *program], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout.readline() == b"['one', 'two']\n"
        family = descendants([parent.pid])
        parent.kill()
        assert waited_for(lambda: not running(family))


def test_process_without_lifeline_goes_on(monkeypatch):
    for wrong in ("", "x", "-1"):
        monkeypatch.setenv(LIFELINE_VARIABLE, wrong)
        end_with_parent()
        assert LIFELINE_VARIABLE not in os.environ
    without = "import sys; sys.argv = ['x']; from fedcover.host.orphans import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert process.stderr.startswith("usage: python -P -m fedcover.host.orphans")
