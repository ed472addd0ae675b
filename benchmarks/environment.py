"""When, on what, and with which versions something was measured."""

import os
import platform
import time
from importlib.metadata import version

from fedcover.version import __version__


def environment_info() -> dict[str, object]:
    """Return the date, the machine with its load, and the versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, load {os.getloadavg()[1]:.1f}",
        "versions": {
            "fedcover": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "flwr")},
        },
    }
