"""Does a message leave anything behind in Flower's long-lived processes? Hundreds of them, without training.

Run by `make soak`; prints JSON. One SuperNode echoes arrays; its pause of three seconds between two looks is shortened,
so that hundreds of messages take minutes. Sizes are as in `flower_soak.py`, of every ten messages the median.

Beside the pages that it has, a SuperNode tells after every look for garbage what it holds: pieces in Python's own
memory, and bytes from `malloc`, large ones with pages of their own included. Of every ten messages the least counts:
between two messages it holds nothing of either.
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.flower_soak import SETTLED, Sizes, growth, sizes, usual
from fedcover.flower.processes import Local, free_port

SENT = b"Sent successfully"
"""What a SuperNode says when a message is done with."""
TOGETHER = 10
"""Messages of which the median is taken."""
FILES = {
    "hurried.py": """
import ctypes, sys, time, types
from fedcover.flower import forgetting, steady
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c apart d e used free f".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
def tell(tidy=steady.tidy):
    tidy()
    found = library.mallinfo2()
    print("HOLDS", sys.getallocatedblocks(), found.used + found.apart, flush=True)
steady.tidy = tell
def main():
    from flwr.supernode import start_client_internal
    start_client_internal.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda s: time.sleep(min(s, 0.05))})
    forgetting.main()
if __name__ == "__main__":
    steady.PROGRAMS["flower-supernode"] = "hurried:main"
    steady.main()
""",
    "app/pyproject.toml": """
[project]
name = "echo"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"
[tool.flwr.app.config]
messages = MESSAGES
""",
    "app/echo/__init__.py": "",
    "app/echo/client.py": """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    return Message(RecordDict({"back": message.content.array_records["there"]}), reply_to=message)
""",
    "app/echo/server.py": """
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    for number in range(context.run_config["messages"]):
        arrays = {str(n): Array(np.random.default_rng((number, n)).random((64, 200), np.float32)) for n in range(4)}
        (asked,) = grid.push_messages(
            [Message(RecordDict({"there": ArrayRecord(arrays)}), dst_node_id=nodes[0], message_type="train")]
        )
        while not list(grid.pull_messages([asked])):
            time.sleep(0.05)
""",
}


def held(log: str, tens: int) -> dict[str, list[int]]:
    """The least that a SuperNode has held over every ten messages, by its log."""
    parts = log.split(SENT.decode())
    found = [
        re.findall(r"^HOLDS (\d+) (\d+)$", "".join(parts[ten * TOGETHER : (ten + 1) * TOGETHER]), re.MULTILINE)
        for ten in range(tens)
    ]
    return {
        what: [min(int(told[column]) for told in some) for some in found if some]
        for column, what in enumerate(("python_pieces", "malloc_bytes"))
    }


def start(place: Path, messages: int) -> Local:
    """A SuperLink and a SuperNode that does not pause."""
    for name, text in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("MESSAGES", str(messages)))
    federation = Local(place / "flower")
    federation.start_link()
    federation.start(
        "supernode", sys.executable, str(place / "hurried.py"), "flower-supernode", "--superlink", federation.address,
        "--host", "127.0.0.1", "--port", str(free_port()), "--insecure",
    )  # fmt: skip
    return federation


def measure(place: Path, messages: int) -> dict[str, Any]:
    """Send the messages and look at the processes all the time."""
    federation = start(place, messages)
    looks: list[list[Sizes]] = [[] for _ in range(messages // TOGETHER)]
    told = federation.log("supernode")
    try:
        with (place / "log.txt").open("wb") as log:
            process = federation.submit(place / "app", log)
            while process.poll() is None:
                echoed = told.read_bytes().count(SENT)
                if echoed // TOGETHER < len(looks):
                    looks[echoed // TOGETHER].append(sizes(federation))
                time.sleep(0.5)
        echoed = told.read_bytes().count(SENT)
    finally:
        federation.stop()
    seen = [usual(some) for some in looks if some]
    lived = [name for name in seen[-1] if all(name in look for look in seen)]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load {os.getloadavg()[1]:.1f}",
        "messages": messages,
        "echoed": echoed,
        "messages_of_one_median": TOGETHER,
        "supernode_holds": held(told.read_text(errors="replace"), len(looks)),
        "memory_by_ten_messages": {name: growth([look[name] for look in seen]) for name in lived},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300)
    given = parser.parse_args()
    if given.messages < 3 * SETTLED * TOGETHER:
        parser.error(f"--messages must be at least {3 * SETTLED * TOGETHER}")
    with tempfile.TemporaryDirectory(prefix="fedcover-messages-") as folder:
        print(json.dumps(measure(Path(folder), given.messages), indent=2))
