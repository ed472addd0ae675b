"""Flower's SuperNode that can reconnect after a kill, and whose children return memory."""

import sys

from flwr.supernode.cli import flower_supernode

from fedcover.flower import unsupported_version
from fedcover.flower.memory import map_large_tensors_in_children


def main() -> None:
    """Run Flower's `flower-supernode` with `ReconnectingClient` as its connection.

    A version of Flower that was not tested keeps its own connection.
    """
    map_large_tensors_in_children()
    if reason := unsupported_version():
        print(
            f"fedcover: after a kill, Flower will refuse this node for a while: {reason}",
            file=sys.stderr,
        )
    else:
        _let_reconnect()
    flower_supernode()


def _let_reconnect() -> None:
    from fedcover.flower.private_api import replace_node_connection  # fails if untested
    from fedcover.flower.reconnection import ReconnectingClient

    replace_node_connection(ReconnectingClient)
