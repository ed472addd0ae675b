"""What `python -m fedcover.flower.steady flower-supernode` changes of Flower's SuperNode."""

import os
import platform

import pytest
from flwr.supernode import fleet_http_connection

from fedcover.flower import supernode
from fedcover.flower.reconnection import ReconnectingClient


@pytest.fixture
def started(monkeypatch):
    """What is set when Flower's own program begins."""
    seen = {}

    def flower_supernode():
        seen["client"] = fleet_http_connection.FleetHttpClient
        seen["tunables"] = os.environ["GLIBC_TUNABLES"]

    client = fleet_http_connection.FleetHttpClient
    monkeypatch.setattr(fleet_http_connection, "FleetHttpClient", client)  # is put back
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setattr(supernode, "flower_supernode", flower_supernode)
    supernode.main()
    return seen


def test_killed_node_can_reconnect(started):
    assert started["client"] is ReconnectingClient


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")
def test_processes_of_messages_return_large_tensors(started):
    assert "glibc.malloc.mmap_threshold=1048576" in started["tunables"]
