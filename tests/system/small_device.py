"""A node's work in a process of its own: `python -m tests.system.small_device first-folder folder
room`.

It does one piece of work, which loads all that any work needs, and then the one that is measured.
Says how many bytes more of memory it had at the height of that one, and what it answers.
"""

import hashlib
import json
import resource
import sys
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedcover.flower.client_training import train_clients
from fedcover.flower.memory import release_memory
from fedcover.flower.messages import (
    ClientResult,
    ClientTask,
    TaskRequest,
    read_results,
    request_message,
)
from fedcover.types import Client


def resident(what: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def message_from(folder: Path) -> Message:
    """The message with one client's work that lies in a folder."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    output = json.loads((folder / "order.json").read_text())
    client = Client(output["client"], output["capacity"], 0, 0, ())
    client_task = ClientTask(
        client.id, client.capacity, 0, bytes.fromhex(output["encoded"]), 0, "nonce"
    )
    payload = (folder / "parcel").read_bytes()
    return request_message(
        7, TaskRequest(0, 0.01, 1, output["experiment"], (client_task,), (payload,)), ttl=60.0
    )


def answered(message: Message) -> ClientResult:
    """What a node answers for its only client."""
    (answer,) = read_results(train_clients(message, Context(1, 7, {}, RecordDict(), {})))
    return answer


def main(first: str, folder: str, room: str) -> None:
    """Work, the second time with room for so many bytes beyond what there is by then (0: without a
    limit).
    """
    answered(message_from(Path(first)))
    release_memory()
    before = resident("VmRSS"), resident("VmSize")
    message = message_from(Path(folder))
    if int(room):
        resource.setrlimit(resource.RLIMIT_AS, (before[1] + int(room),) * 2)
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # from now on the highest value is looked for anew
    answer = answered(message)
    digest = hashlib.sha256(answer.payload).hexdigest()
    print(
        json.dumps({"rise": resident("VmHWM") - before[0], "digest": digest, "error": answer.error})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
