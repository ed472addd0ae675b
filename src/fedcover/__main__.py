"""`fedcover` and `python -m fedcover`."""

import sys


def main() -> None:
    """The commands; Ctrl-C leaves quietly, also in the seconds in which torch is imported."""
    try:
        from fedcover.cli import main as commands

        commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
