"""What `python -m fedcover.flower.steady flower-supernode` changes of Flower's SuperNode."""

import os
import platform

import pytest
from flwr.supernode import fleet_http_connection

from fedcover.flower import supernode
from fedcover.flower.reconnection import ReconnectingClient


@pytest.fixture
def start(monkeypatch):
    """Starts a SuperNode, and returns what is set when Flower's own program begins."""
    calls = {}

    def flower_supernode():
        calls["client"] = fleet_http_connection.FleetHttpClient
        calls["tunables"] = os.environ["GLIBC_TUNABLES"]

    client = fleet_http_connection.FleetHttpClient
    monkeypatch.setattr(fleet_http_connection, "FleetHttpClient", client)  # is put back
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setattr(supernode, "flower_supernode", flower_supernode)

    def start():
        supernode.main()
        return calls

    return start


def test_killed_node_can_reconnect(start):
    assert start()["client"] is ReconnectingClient


def test_untested_version_of_flower_keeps_its_connection(start, monkeypatch, capsys):
    monkeypatch.setattr(supernode, "unsupported_version", lambda: "it is too new")
    assert start()["client"] is not ReconnectingClient
    assert "Flower will refuse this node for a while: it is too new" in capsys.readouterr().err


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")
def test_processes_of_messages_return_large_tensors(start):
    assert "glibc.malloc.mmap_threshold=1048576" in start()["tunables"]
