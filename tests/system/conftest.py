"""All tests of this folder start real Flower processes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from fedcover.flower.local_federation import run_local_federation

HERE = Path(__file__).parent
NEED_FLOWER = (
    "test_supernode.py",
    "test_node_answers.py",
    "test_node_parts.py",
    "handmade.py",
    "small_device.py",
    "test_introductions.py",
    "test_small_devices.py",
    "test_strategy.py",
    "test_loopback.py",
    "test_node_task.py",
    "test_open_fleet.py",
    "test_rows_on_nodes.py",
    "loopback.py",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A SuperLink and two SuperNodes that share the clients."""
    configs = [{"partition-id": place, "num-partitions": 2} for place in range(2)]
    with run_local_federation(tmp_path_factory.mktemp("flower"), configs) as federation:
        yield federation


@pytest.fixture
def inside_a_task(monkeypatch):
    """What Flower knows of its task in a client process, set in this one."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def pytest_ignore_collect(collection_path):
    """Without the extra `flower` these cannot even be imported; `make test-system` installs it."""
    return True if collection_path.name in NEED_FLOWER and find_spec("flwr") is None else None
