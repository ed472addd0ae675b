"""The launcher of Flower's long-lived programs."""

import subprocess
import sys


def test_steady_without_flower_says_what_to_install():
    without_flower = (
        "import sys; sys.modules['flwr'] = None; from fedcover.flower import steady; steady.main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", without_flower, "flower-superlink"],
        capture_output=True,
        text=True,
        check=False,
    )
    message = "fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'\n"
    assert (process.returncode, process.stderr) == (1, message)


def test_only_programs_of_flower_are_run():
    process = subprocess.run(
        [sys.executable, "-m", "fedcover.flower.steady", "ls"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    message, usage = process.stderr.splitlines()
    assert (
        message == "fedcover: program must be one of flower-superlink, flower-supernode; got 'ls'"
    )
    command = [sys.executable, "-m", "fedcover.flower.steady", "--help"]
    assert subprocess.check_output(command, text=True).splitlines() == [usage]
