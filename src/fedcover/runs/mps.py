"""One GPU shared by several processes through CUDA's multi-process service."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shutil import which

from fedcover.host import scratch

MPS = "nvidia-cuda-mps-control"


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


QUEUES_OF_ALL = 64
"""Hardware queues that processes share under MPS: who does not ask gets few, and its clients' streams wait in line.

On an H200 a `streams` step of ten clients took 9.2 ms so, and 3.1 with 32 asked for; 116 of all could be had, 128 not.
"""


@contextmanager
def mps_environment(processes: int) -> Iterator[Mapping[str, str]]:
    """The environment of processes whose kernels may run at the same time, by a server of NVIDIA's, if it is there.

    Without it, or if one is running already, the environment as it is.
    """
    place = "CUDA_MPS_PIPE_DIRECTORY"
    if place in os.environ or not which(MPS):
        yield os.environ
        return
    for left in scratch.abandoned("mps"):  # a killed sweep has left its server running
        _say_quit({**os.environ, place: str(left)})
    with scratch.folder("mps") as folder:
        queues = str(min(32, max(2, QUEUES_OF_ALL // processes)))
        shared = {
            QUEUES: queues,
            **os.environ,
            place: str(folder),
            "CUDA_MPS_LOG_DIRECTORY": str(folder),
        }
        started = (
            subprocess.run([MPS, "-d"], env=shared, capture_output=True, check=False).returncode
            == 0
        )
        try:
            yield shared if started else os.environ
        finally:
            if started:
                _say_quit(shared)


def _say_quit(environment: Mapping[str, str]) -> None:
    subprocess.run([MPS], input=b"quit", env=environment, capture_output=True, check=False)
