"""The logger of the package, and warnings that are logged only once."""

import logging

log = logging.getLogger("fedcover")

_WARNED: set[str] = set()


def warn_once(reason: str) -> None:
    """Log why an engine is slower than it could be, once for each reason."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        log.warning("engine: %s", reason)
