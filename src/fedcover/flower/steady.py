"""Run one of Flower's long-lived programs so that it ends with its parent.

Use it as `python -m fedcover.flower.steady flower-supernode ...`. A SuperNode that runs so can also
reconnect after a kill, and the processes of its messages return memory.
"""

import sys
from pkgutil import resolve_name

from fedcover.errors import unknown
from fedcover.host.orphans import end_with_parent

FLOWER_PROGRAMS = {
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "fedcover.flower.supernode:main",
}
"""Flower's programs that live as long as a federation."""

USAGE = (
    f"usage: python -m fedcover.flower.steady {{{','.join(FLOWER_PROGRAMS)}}} "
    "[the program's own options]"
)


def main() -> None:
    """Run the program that the first argument names, with the remaining arguments."""
    sys.argv = sys.argv[1:] or [""]
    name = sys.argv[0]
    if name in ("-h", "--help"):
        print(USAGE)
        return
    if name not in FLOWER_PROGRAMS:
        sys.exit(f"fedcover: {unknown('program', name, FLOWER_PROGRAMS)}\n{USAGE}")
    end_with_parent()
    try:
        program = resolve_name(FLOWER_PROGRAMS[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        sys.exit("fedcover: this needs Flower; in a checkout of fedcover: pip install '.[flower]'")
    program()


if __name__ == "__main__":
    main()
