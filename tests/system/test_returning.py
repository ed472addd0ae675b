"""A SuperNode with a registered key is killed: it is let in again at once, and nobody else in its
place.
"""

import shutil
import signal

import pytest
from benchmarks.tls_federation import TLSFederation

from tests.system.harness import PATIENCE, wait_for

CONFIG = {"partition-id": 0, "num-partitions": 1}
REFUSED, LET_IN = "[code: 2004]", "SuperNode ID"


@pytest.fixture
def federation(tmp_path):
    """A SuperLink with TLS that knows one key."""
    federation_of_nodes = TLSFederation(tmp_path)
    try:
        federation_of_nodes.prepare()
        federation_of_nodes.start_superlink()
        federation_of_nodes.register("node-0")
        shutil.copy(tmp_path / "node-0.key", tmp_path / "twin.key")
        yield federation_of_nodes
    finally:
        federation_of_nodes.stop()


def answers(federation, name, count):
    """What the SuperLink has said to a node, once it has answered so many starts."""

    def said():
        text = federation.log(name).read_text()
        return sorted(word for word in (REFUSED, LET_IN) for _ in range(text.count(word)))

    wait_for(lambda: len(said()) >= count, f"{count} answers: {federation.log(name).read_text()}")
    return said()


def test_killed_supernode_is_admitted_again_at_once(federation):
    """Flower itself refuses it until the killed one has been silent for a minute."""
    federation.start_supernode("node-0", CONFIG)
    assert answers(federation, "node-0", 1) == [LET_IN]
    federation.kill("node-0")
    federation.start_supernode("node-0", CONFIG)
    assert answers(federation, "node-0", 2) == [LET_IN] * 2


def test_second_node_with_the_same_key_is_refused(federation):
    """Beside one that lives, with or without the file in which that one keeps its number, and after
    it has moved.
    """
    first = federation.start_supernode("node-0", CONFIG)
    assert answers(federation, "node-0", 1) == [LET_IN]
    federation.start_supernode("twin", CONFIG).wait(PATIENCE)
    assert answers(federation, "twin", 1) == [REFUSED]
    federation.start_supernode("node-0", CONFIG).wait(PATIENCE)
    assert answers(federation, "node-0", 2) == [LET_IN, REFUSED]
    first.send_signal(signal.SIGTERM)
    first.wait(PATIENCE)
    federation.start_supernode("twin", CONFIG)
    assert answers(federation, "twin", 2) == [LET_IN, REFUSED]
    federation.start_supernode("node-0", CONFIG).wait(PATIENCE)
    assert answers(federation, "node-0", 3) == [LET_IN, REFUSED, REFUSED]
