"""Run one of Flower's long-lived programs with level memory.

Use it as `python -m fedcover.flower.steady flower-supernode ...`.

Messages leave reference cycles behind, and Python looks through old objects only after their
number has grown by a quarter. As all that Flower imports is old, that takes some twenty rounds,
and by then the heap is fragmented.
"""

import gc
import sys
import threading
import time
from pkgutil import resolve_name

from fedcover.errors import unknown
from fedcover.flower.memory import (
    disable_thread_caches,
    map_large_tensors_in_children,
    memory_reserve,
    release_memory,
    share_one_heap,
)
from fedcover.host.orphans import end_with_parent

FLOWER_PROGRAMS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "fedcover.flower.supernode:main",
}
"""Flower's programs that live as long as a federation."""

STARTS_LONG_LIVED = ("flower-superlink",)
"""The programs that start long-lived ones: the server of a run.

A SuperNode starts short-lived processes, one for each message.
"""

USAGE = (
    f"usage: python -m fedcover.flower.steady {{{','.join(FLOWER_PROGRAMS)}}} "
    "[the program's own options]"
)

PAUSE = 2.0
"""Seconds between two releases of memory."""


def main() -> None:
    """Run the program that the first argument names, with the remaining arguments."""
    sys.argv = sys.argv[1:] or [""]
    name = sys.argv[0]
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name not in FLOWER_PROGRAMS:
        sys.exit(f"fedcover: {unknown('program', name, FLOWER_PROGRAMS)}\n{USAGE}")
    starts_long_lived = name in STARTS_LONG_LIVED
    disable_thread_caches(inherited=starts_long_lived)
    if not starts_long_lived:
        map_large_tensors_in_children()
    share_one_heap()
    end_with_parent()  # after the settings: it starts a thread
    try:
        program = resolve_name(FLOWER_PROGRAMS[name])  # this import starts a thread, too
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        sys.exit("fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'")
    gc.freeze()  # imported objects stay alive; no collection needs to visit them
    threading.Thread(target=_release_memory_forever, daemon=True).start()
    program()


def _release_memory_forever() -> None:
    time.sleep(PAUSE)  # the start of the program must not use up the reserve
    with memory_reserve():
        while True:
            release_memory()
            time.sleep(PAUSE)


if __name__ == "__main__":
    main()
