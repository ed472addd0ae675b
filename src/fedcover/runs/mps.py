"""Share one GPU between processes through CUDA's multi-process service (MPS)."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shutil import which

from fedcover.host import scratch

MPS = "nvidia-cuda-mps-control"

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

QUEUES_OF_ALL = 64
"""Hardware queues that all processes request together.

A process that requests none gets few, and the streams of its clients wait for each other. On an
H200, a `streams` step of ten clients took 9.2 ms by default, and 3.1 ms with 32 queues. All
processes together could get 116 queues, but not 128.
"""

_PIPE_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
_LOG_FOLDER = "CUDA_MPS_LOG_DIRECTORY"


@contextmanager
def mps_environment(processes: int) -> Iterator[Mapping[str, str]]:
    """Yield an environment for processes whose kernels may run at the same time.

    This starts NVIDIA's MPS server. If there is none, or one is already in use, the environment
    is this process's own.
    """
    if _PIPE_FOLDER in os.environ or not which(MPS):
        yield os.environ
        return
    for folder in scratch.abandoned("mps"):  # a killed sweep has left its server running
        _stop_server({**os.environ, _PIPE_FOLDER: str(folder)})
    with scratch.folder("mps") as folder:
        environment = {
            QUEUES: str(min(32, max(2, QUEUES_OF_ALL // processes))),
            **os.environ,
            _PIPE_FOLDER: str(folder),
            _LOG_FOLDER: str(folder),
        }
        server = subprocess.run([MPS, "-d"], env=environment, capture_output=True, check=False)
        if server.returncode != 0:
            yield os.environ
            return
        try:
            yield environment
        finally:
            _stop_server(environment)


def _stop_server(environment: Mapping[str, str]) -> None:
    subprocess.run([MPS], input=b"quit", env=environment, capture_output=True, check=False)
