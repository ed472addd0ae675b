"""What every test process starts with, however it was started and on whatever machine."""

import os
import signal
import sys

# Before torch is imported, and for the processes that tests start: one thread each, and no pool of
# compilers. Small steps wait for each other more than they work, whatever the number of cores.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# With `&` or nohup a parent may ignore these signals, and processes inherit that. Tests that stop
# a program need it to hear them: once a handler is set here, programs start with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def only_the_cpu(request):
    """No test uses a GPU, on which bits differ, but those of `test_cuda.py`."""
    if request.node.path.name == "test_cuda.py":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture
def fedcover(monkeypatch, capsys, tmp_path):
    """The command line in a folder of its own: arguments -> exit code, output, errors."""
    from fedcover import cli

    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedcover", *map(str, args)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def no_warnings_yet(monkeypatch):
    """A log that has warned of nothing, so that what is said once is said again."""
    from fedcover import log

    monkeypatch.setattr(log, "_WARNED", set())
