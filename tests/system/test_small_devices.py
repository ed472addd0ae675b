"""What a node's work costs it: the memory of its own part, measured, limited, and as an
audit says.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.analysis.audit import audit
from fedcover.flower.local_federation import run_local_federation
from fedcover.flower.payloads import encode_reduction
from fedcover.flower.state_payload import build_payload
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.server.reply_format import pack_update
from fedcover.server.round import initial_state
from fedcover.server.safetensors_codec import pack_arrays
from fedcover.submodels.reductions import windows
from fedcover.training.local_sgd import train_client
from fedcover.types import Client
from tests.system.harness import children, submit

NODE_SETTINGS = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
"""What docs/deploy.md says to set for a node."""
SHARES = (1.0, 0.5, 0.25)
ROOM = 60_000_000
"""Bytes: the whole model has 101 million, a quarter-width part 6.6 million; training holds four
times as much.
"""


def experiment(hidden):
    return fc.Experiment(
        model=f"mlp(hidden={hidden})",
        clients=20,
        active=20,
        epochs=1,
        fleet="1x1.0 + 1x0.5 + 2x0.25",
        policy="prefix",
    )


def write(folder, wanted, shares):
    """The work of a client for each of some shares; the digests of what a simulation answers."""
    setup = prepare(wanted, Machine("sequential", "cpu").resolved())
    state, model, digests = initial_state(setup), setup.task.model, {}
    for share in shares:
        client = Client(0, share, 0, setup.task.source.count(0), setup.task.source.labels(0))
        encoded, wire = encode_reduction(windows(model.groups, share), model)
        place = folder / f"{share}"
        place.mkdir(parents=True)
        (place / "parcel").write_bytes(build_payload(setup.task, state, client, wire))
        order = {
            "client": 0,
            "capacity": share,
            "encoded": encoded.hex(),
            "experiment": wanted.to_toml(),
        }
        (place / "order.json").write_text(json.dumps(order))
        if share < 0.5:
            update = train_client(setup.task, state, client, wire, 0.01)
            digests[share] = hashlib.sha256(pack_arrays(pack_update(update))).hexdigest()
    return digests


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write(folder / "tiny", experiment([10]), [1.0])
    return folder, write(folder / "large", experiment([5000, 5000]), SHARES)


def node(folder, share, room=0):
    """What a node says that does a client's work."""
    first, second = folder / "tiny" / "1.0", folder / "large" / f"{share}"
    command = [
        sys.executable,
        "-m",
        "tests.system.small_device",
        str(first),
        str(second),
        str(room),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **NODE_SETTINGS}
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_memory_of_a_small_part_is_as_audited(work):
    folder, _ = work
    rises = {share: node(folder, share)["rise"] for share in SHARES}
    assert rises[0.25] <= 0.12 * rises[1.0]
    for row in audit(experiment([5000, 5000]))["capacities"]:
        assert rises[row["capacity"]] == pytest.approx(row["memory"], rel=0.15), rises


def test_small_device_trains_its_part(work):
    folder, digests = work
    part = node(folder, 0.25, ROOM)
    assert (part["error"], part["digest"]) == ("", digests[0.25])
    assert "memory" in node(folder, 1.0, ROOM)["error"].lower()


LOADING = """
import resource, sys
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedcover.flower.client import experiment_app
from fedcover.flower.messages import TaskRequest, request_message
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
app, message = experiment_app(), request_message(7, TaskRequest(0, 0.01, 1, "", (), ()), ttl=60.0)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(sys.argv[1]),) * 2)
try:
    app(message, Context(1, 7, {}, RecordDict(), {}))
except Exception as error:
    print(type(error).__name__, error)
"""
"""A node's app that is given a message when there is room for so many bytes beyond Flower's own."""


@pytest.mark.parametrize("room", [5_000_000, 100_000_000])
def test_device_too_small_for_torch_says_so(room):
    process = subprocess.run(
        [sys.executable, "-c", LOADING, str(room)], capture_output=True, text=True, timeout=300
    )
    assert process.stdout.startswith(
        "MemoryError this device has too little memory to load torch: "
    ), process


def highest(federation, hidden, share, folder):
    """The most memory, in bytes, that a process had which Flower started for a message of a run of
    one client.
    """
    experiment = fc.Experiment(
        model=f"mlp(hidden={hidden})",
        clients=1,
        active=1,
        epochs=1,
        rounds=1,
        fleet=f"1x{share}",
        policy="prefix",
    )
    most, run = 0, submit(federation, experiment, folder, wait=5.0, deadline=300.0)
    while run.process.poll() is None:
        for pid in children(federation, "supernode-0", "flwr-clientapp"):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                continue
            most = max(
                [most, *(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))]
            )
        time.sleep(0.05)
    assert len(run.lines()) == 1, run.text[-2000:]
    return most


def test_whole_process_of_a_message_takes_the_audited_memory(
    tmp_path,
):
    with run_local_federation(
        tmp_path / "flower", [{"partition-id": 0, "num-partitions": 1}]
    ) as federation:
        tiny = highest(federation, [10], 1.0, tmp_path / "tiny")

        def rise(share, attempt):
            folder = tmp_path / f"{share}-{attempt}"
            return highest(federation, [5000, 5000], share, folder) - tiny

        for row in audit(experiment([5000, 5000]))["capacities"]:
            audited = pytest.approx(row["memory"], rel=0.15)
            measured = rise(row["capacity"], 1)
            if measured != audited:  # what a peak holds in garbage differs by a few megabytes
                measured = rise(row["capacity"], 2)
            assert measured == audited, row["capacity"]
