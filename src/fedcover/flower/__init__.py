"""The same rounds on Flower's SuperLink and SuperNodes; needs the extra `flower`.

Only this package imports `flwr`. In an app of your own, use `CoverageStrategy` with a `Sampling` on
the server, and `client_app` on the nodes.

- On the server: `server`, `engine`, `transport`, `reply_download`, `registration`, `node_registry`,
  `events`, `status`.
- On a node: `client` and `client_*`, `node_task`, `node_data`, `supernode`, `reconnection`.
- On both: `messages` and what they carry, `payloads` and `state_payload`.
- In an app of your own: `strategy` and `strategy_*`, `sampling`, `bounded_grid`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedcover.errors import InvalidValue

if TYPE_CHECKING:
    from fedcover.flower.client import client_app as client_app
    from fedcover.flower.sampling import Sampling as Sampling
    from fedcover.flower.strategy import CoverageStrategy as CoverageStrategy

_MODULE_OF = {"CoverageStrategy": "strategy", "Sampling": "sampling", "client_app": "client"}
__all__ = ["CoverageStrategy", "Sampling", "client_app"]


OLDEST, FIRST_UNTESTED = "1.41", "1.43"
"""The versions of Flower that fedcover works with: from the first one on, and before the second."""
SUPPORTED = f">={OLDEST},<{FIRST_UNTESTED}"
"""The same as a version specifier."""


def require() -> None:
    """Raise an InvalidValue if Flower is not installed."""
    if find_spec("flwr") is None:
        raise InvalidValue("this needs Flower; in a checkout of fedcover: pip install '.[flower]'")


def require_supported() -> None:
    """Raise an InvalidValue if Flower is not installed, or in a version that was not tested."""
    require()
    if reason := unsupported_version():
        raise InvalidValue(reason)


def unsupported_version() -> str:
    """Return why the installed version of Flower cannot be used, or an empty string."""
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        installed = "unknown"
    if _parse(OLDEST) <= _parse(installed) < _parse(FIRST_UNTESTED):
        return ""
    return (
        f"the version of Flower must be {SUPPORTED}; got {installed}: pip install 'flwr{SUPPORTED}'"
    )


def _parse(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; none of a version that has no numbers.

    >>> _parse("1.41.0"), _parse("1.43.0.dev20261101"), _parse("unknown")
    ((1, 41), (1, 43), ())
    """
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else ()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedcover.flower' has no attribute {name!r}")
    require()
    return getattr(import_module(f"fedcover.flower.{_MODULE_OF[name]}"), name)
