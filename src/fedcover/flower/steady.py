"""`python -m fedcover.flower.steady flower-supernode ...`: a program of Flower's that does not grow while it runs.

What a message leaves behind hangs in cycles, and Python looks through old objects only once a quarter more of them has
come together. All that Flower imports is old, so that takes some twenty rounds, and the heap is in pieces by then.
"""

import gc
import sys
import threading
import time
from pkgutil import resolve_name

from fedcover.errors import unknown
from fedcover.flower.memory import no_caches, one_heap, own_pages_in_children, reserve, tidy
from fedcover.host.orphans import end_with_parent

PROGRAMS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "fedcover.flower.forgetting:main",
}
"""Flower's programs that live as long as a federation."""

LASTING = ("flower-superlink",)
"""Those that start programs which live as long as a run: its server. What a SuperNode starts trains, and ends."""

USAGE = (
    f"usage: python -m fedcover.flower.steady {{{','.join(PROGRAMS)}}} [the program's own options]"
)

PAUSE = 2.0
"""Seconds between two looks."""


def main() -> None:
    """Run the program that the first argument names, with the others, until it is ended."""
    sys.argv = sys.argv[1:] or [""]
    if sys.argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if sys.argv[0] not in PROGRAMS:
        sys.exit(f"fedcover: {unknown('program', sys.argv[0], PROGRAMS)}\n{USAGE}")
    no_caches(inherited=sys.argv[0] in LASTING)
    if sys.argv[0] not in LASTING:
        own_pages_in_children()
    one_heap()
    end_with_parent()  # not before: it starts a thread
    try:
        program = resolve_name(
            PROGRAMS[sys.argv[0]]
        )  # not before: importing it starts a thread already
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        sys.exit("fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'")
    gc.freeze()  # what is imported stays for good; each look would go through all of it
    threading.Thread(target=_stay_tidy, daemon=True).start()
    program()


def _stay_tidy() -> None:
    time.sleep(PAUSE)  # what the program needs for its start is not to come out of the reserve
    with reserve():
        while True:
            tidy()
            time.sleep(PAUSE)


if __name__ == "__main__":
    main()
