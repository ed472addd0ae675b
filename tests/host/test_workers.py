"""Workers do their jobs and report; their errors are raised here, and none is left over."""

import signal
import subprocess
import sys

import pytest

from fedcover.errors import DataError, RunError
from fedcover.host.workers import start_workers
from tests.helpers.processes import running, waited_for

FUNCTIONS = "tests.helpers.worker_functions"
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def reports_of(function, jobs, **options):
    with start_workers(f"{FUNCTIONS}:{function}", jobs, **options) as workers:
        return list(workers.reports())


def test_each_worker_gets_its_job_and_what_it_prints_is_no_report(capfd):
    jobs = [{"left": 1, "right": 2}, {"left": "a", "right": "ä\n"}]
    results = [report["sum"] for report in reports_of("add", jobs)]
    assert sorted(results, key=str) == [3, "aä\n"]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("a module prints this") == 2


def test_reports_of_one_worker_keep_their_order_and_jobs_may_be_long():
    assert reports_of("count", [500]) == list(range(500))
    assert reports_of("measure", ["x" * 3_000_000]) == [3_000_000]


def test_no_jobs_need_no_workers():
    assert reports_of("count", []) == []


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("fail", DataError, "^the data is truncated$"),
        ("fail_in_a_new_way", RunError, "^it is odd$"),
        ("be_wrong", RunError, "^one of them ended with 1$"),
        ("die", RunError, "^one of them ended with -9$"),
        ("no_such_function", RunError, "^one of them ended with 1$"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_raised_here(function, error, message, capfd):
    with pytest.raises(error, match=message):
        reports_of(function, [1, 2], name="one of them")
    output = capfd.readouterr().err
    assert ("Traceback" in output) == (function in ("be_wrong", "no_such_function"))


def test_all_workers_stop_when_one_fails():
    processes = []

    def start():
        with start_workers(f"{FUNCTIONS}:fail_or_wait", ["wait", "wait", "fail"]) as workers:
            processes.extend(workers.processes)
            list(workers.reports())

    with pytest.raises(DataError):
        start()
    assert None not in [process.returncode for process in processes]


def start_and_stop(function, jobs, processes):
    """Start workers, wait until each has reported, and leave their block by Ctrl-C."""
    with start_workers(f"{FUNCTIONS}:{function}", jobs) as workers:
        processes += workers.processes
        reports = workers.reports()
        for _ in jobs:
            next(reports)
        assert {process.returncode for process in workers.processes} == {None}
        raise KeyboardInterrupt


def test_workers_stop_without_output_when_the_block_fails(capfd):
    processes = []
    with pytest.raises(KeyboardInterrupt):
        start_and_stop("wait", [1, 2], processes)
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_is_stopped_saves_its_work(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        start_and_stop("save", [str(tmp_path / "work")], [])
    assert (tmp_path / "work").read_text() == "saved"


PARENT = f"""
from fedcover.host.workers import start_workers
with start_workers("{FUNCTIONS}:wait_with_child", [1, 2]) as workers:
    for pids in workers.reports():
        print(*pids, flush=True)
"""


@linux
def test_no_worker_and_nothing_it_has_started_outlives_a_parent_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        family = {int(pid) for _ in range(2) for pid in parent.stdout.readline().split()}
        assert running(family) == family
        parent.kill()
        assert waited_for(lambda: not running(family), 10)
