"""Does a message leave anything behind in Flower's long-lived processes? Hundreds of them, without training.

Run by `make soak`; prints JSON. One SuperNode echoes arrays; its pause of three seconds between two looks is shortened,
so that hundreds of messages take minutes. Sizes are as in `flower_memory.py`, of every ten messages the median.

What the SuperNode holds, beside the pages that it has, is the least of every ten messages.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.flower_memory import (
    SETTLED_ROUND,
    Sizes,
    environment_info,
    growth,
    hold_more,
    install_probe,
    long_lived_processes,
    median_sizes,
    read_probe,
    sizes,
)
from fedcover.flower.local_federation import LocalFederation, free_port

SENT = b"Sent successfully"
"""What a SuperNode says when a message is done with."""
TOGETHER = 10
"""Messages of which the median is taken."""
FILES = {
    "hurried.py": """
import time, types
from fedcover.flower import supernode, steady
def main():
    from flwr.supernode import start_client_internal
    start_client_internal.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda s: time.sleep(min(s, 0.05))})
    supernode.main()
if __name__ == "__main__":
    steady.FLOWER_PROGRAMS["flower-supernode"] = "hurried:main"
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


def start(place: Path, messages: int) -> LocalFederation:
    """A SuperLink and a SuperNode that does not pause."""
    for name, text in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("MESSAGES", str(messages)))
    federation = LocalFederation(place / "flower", [str(install_probe(place / "telling"))])
    federation.start_superlink()
    federation.start(
        "supernode", sys.executable, str(place / "hurried.py"), "flower-supernode", "--superlink", federation.address,
        "--host", "127.0.0.1", "--port", str(free_port()), "--insecure",
    )  # fmt: skip
    return federation


def measure(place: Path, messages: int) -> dict[str, Any]:
    """Send the messages and look at the processes all the time."""
    federation = start(place, messages)
    looks: list[list[Sizes]] = [[] for _ in range(messages // TOGETHER)]
    ends: list[float] = []
    log, pids = federation.log("supernode"), long_lived_processes(federation)
    try:
        with (place / "log.txt").open("wb") as out:
            process = federation.submit(place / "app", out)
            while process.poll() is None:
                echoed = log.read_bytes().count(SENT)
                ends += [time.time()] * (echoed // TOGETHER - len(ends))
                pids |= long_lived_processes(federation)
                if len(ends) < len(looks):
                    looks[len(ends)].append(sizes(pids))
                time.sleep(0.5)
        echoed = log.read_bytes().count(SENT)
    finally:
        federation.stop()
    seen = [median_sizes(some) for some in looks if some]
    held = read_probe(place / "telling", pids, ends)
    lived = [name for name in seen[-1] if all(name in look for look in seen)]
    return {
        **environment_info(),
        "messages": messages,
        "echoed": echoed,
        "messages_of_one_median": TOGETHER,
        "hold_more": hold_more(held),
        "holds_by_ten_messages": held,
        "memory_by_ten_messages": {name: growth([look[name] for look in seen]) for name in lived},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300)
    given = parser.parse_args()
    if given.messages < 3 * SETTLED_ROUND * TOGETHER:
        parser.error(f"--messages must be at least {3 * SETTLED_ROUND * TOGETHER}")
    with tempfile.TemporaryDirectory(prefix="fedcover-messages-") as folder:
        print(json.dumps(measure(Path(folder), given.messages), indent=2))
