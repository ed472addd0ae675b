"""`fedcover` and `python -m fedcover`."""

import sys

from fedcover import stopping


def main() -> None:
    """The commands; who stops one gets no traceback, also in the seconds in which torch is imported."""
    stopping.quietly()
    from fedcover.cli import main as commands

    try:
        with stopping.in_order():
            try:
                commands()
            except (Exception, KeyboardInterrupt) as error:
                code = stopping.code_of(error)
                if code is None:
                    raise
                sys.exit(code)
    finally:
        stopping.ignored()


if __name__ == "__main__":
    main()
