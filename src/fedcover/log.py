"""The package's logger, and messages that are logged once."""

import logging

log = logging.getLogger("fedcover")


_WARNED: set[str] = set()


def warn_once(reason: str) -> None:
    """Tell the log why something is not as fast as it could be, once."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        log.warning("engine: %s", reason)
