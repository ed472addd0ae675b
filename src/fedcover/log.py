"""The logger of the package, and warnings that are logged only once."""

import logging

log = logging.getLogger("fedcover")

_WARNED: set[str] = set()


def warn_once(reason: str, *, subject: str = "engine") -> None:
    """Log a warning once in this process, such as why an engine is slower than it could be."""
    warning = f"{subject}: {reason}"
    if warning not in _WARNED:
        _WARNED.add(warning)
        log.warning("%s", warning)
