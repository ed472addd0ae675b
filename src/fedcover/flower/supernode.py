"""Flower's SuperNode that can reconnect after a kill, and whose children return memory."""

from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode

from fedcover.flower.memory import map_large_tensors_in_children
from fedcover.flower.reconnection import ReconnectingClient


def main() -> None:
    """Run Flower's `flower-supernode` with `ReconnectingClient` as its connection."""
    map_large_tensors_in_children()
    vars(fleet_http_connection)["FleetHttpClient"] = ReconnectingClient
    flower_supernode()
