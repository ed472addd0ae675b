"""What the workers of `tests/host/test_workers.py` do."""

import os
import signal
import subprocess
import sys
import time

from fedcover.errors import DataError, FedcoverError


def add(job, report):
    print("a module prints this")
    report({"sum": job["left"] + job["right"]})


def count(job, report):
    for number in range(job):
        report(number)


def measure(job, report):
    report(len(job))


def fail(job, report):
    raise DataError("the data is truncated")


class OwnError(FedcoverError):
    """An error of a module that the first process need not know."""


def fail_in_a_new_way(job, report):
    raise OwnError("it is odd")


def be_wrong(job, report):
    raise ZeroDivisionError("a mistake")


def die(job, report):
    report("about to die")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_or_wait(job, report):
    if job == "fail":
        fail(job, report)
    wait(job, report)


def wait(job, report):
    report(os.getpid())
    time.sleep(600)


def wait_with_child(job, report):
    """Start a process of its own, and wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report([os.getpid(), child.pid])
    time.sleep(600)


def save(job, report):
    """Save its work when it is asked to stop."""
    try:
        report("started")
        time.sleep(600)
    finally:
        with open(job, "w") as file:
            file.write("saved")
