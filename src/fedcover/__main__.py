"""`fedcover` and `python -m fedcover`."""

import sys

from fedcover.host import signals


def main() -> None:
    """Run a command; a signal ends it without a traceback, even while torch is being imported."""
    signals.exit_quietly_on_signals()
    from fedcover.cli import main as commands

    try:
        with signals.raise_on_signals():
            try:
                commands()
            except (Exception, KeyboardInterrupt) as error:
                code = signals.exit_code(error)
                if code is None:
                    raise
                sys.exit(code)
    finally:
        signals.ignore_signals()


if __name__ == "__main__":
    main()
