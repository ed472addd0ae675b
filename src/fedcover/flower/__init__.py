"""The same rounds on Flower's SuperLink and SuperNodes; needs the extra `flower`.

Only this room imports `flwr`. In an app of your own, use `CoverageStrategy` with a `Sampling` on
the server, and `client_app` on the nodes.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedcover.errors import InvalidValue

if TYPE_CHECKING:
    from fedcover.flower.client import client_app as client_app
    from fedcover.flower.sampling import Sampling as Sampling
    from fedcover.flower.strategy import CoverageStrategy as CoverageStrategy

_MODULE_OF = {"CoverageStrategy": "strategy", "Sampling": "sampling", "client_app": "client"}
__all__ = ["CoverageStrategy", "Sampling", "client_app"]


def require() -> None:
    """Raise an InvalidValue if Flower is not installed."""
    if find_spec("flwr") is None:
        raise InvalidValue("this needs Flower; in a checkout of fedcover: pip install '.[flower]'")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedcover.flower' has no attribute {name!r}")
    require()
    return getattr(import_module(f"fedcover.flower.{_MODULE_OF[name]}"), name)
