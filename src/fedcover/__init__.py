"""Federated learning over unequal devices: each client trains the part of a model that fits it.

>>> import fedcover as fc
>>> fc.Experiment(fleet="4x1.0 + 6x0.75", policy="rolling").policy
'rolling'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcover.version import __version__ as __version__

if TYPE_CHECKING:
    from fedcover.analysis.report import report as report
    from fedcover.data.datasets import from_file as from_file
    from fedcover.data.datasets import from_tensors as from_tensors
    from fedcover.errors import FedcoverError as FedcoverError
    from fedcover.errors import InvalidValue as InvalidValue
    from fedcover.policies import per_client as per_client
    from fedcover.policies.planner.single_group import plan as plan
    from fedcover.runs.api import load as load
    from fedcover.runs.api import replay as replay
    from fedcover.runs.api import resume as resume
    from fedcover.runs.api import run as run
    from fedcover.runs.experiment import Experiment as Experiment
    from fedcover.runs.export import load_part as load_part
    from fedcover.runs.machine import Machine as Machine
    from fedcover.runs.run_result import Run as Run
    from fedcover.runs.sweep import sweep as sweep
    from fedcover.submodels.reductions import Masks as Masks
    from fedcover.submodels.reductions import Slices as Slices
    from fedcover.submodels.reductions import drawn as drawn
    from fedcover.submodels.reductions import random_slices as random_slices
    from fedcover.submodels.reductions import window_slices as window_slices
    from fedcover.submodels.reductions import windows as windows
    from fedcover.submodels.tracing import trace as trace
    from fedcover.theory.certificate import certify as certify
    from fedcover.types import Client as Client
    from fedcover.types import Cut as Cut
    from fedcover.types import Dataset as Dataset
    from fedcover.types import Model as Model
    from fedcover.types import Samples as Samples
    from fedcover.types import UnitGroup as UnitGroup
    from fedcover.types import View as View

_MODULE_OF = {
    "Client": "types",
    "Cut": "types",
    "Dataset": "types",
    "Experiment": "runs.experiment",
    "FedcoverError": "errors",
    "InvalidValue": "errors",
    "Machine": "runs.machine",
    "Masks": "submodels.reductions",
    "Model": "types",
    "Run": "runs.run_result",
    "Samples": "types",
    "Slices": "submodels.reductions",
    "UnitGroup": "types",
    "View": "types",
    "certify": "theory.certificate",
    "drawn": "submodels.reductions",
    "from_file": "data.datasets",
    "from_tensors": "data.datasets",
    "load": "runs.api",
    "load_part": "runs.export",
    "per_client": "policies",
    "plan": "policies.planner.single_group",
    "random_slices": "submodels.reductions",
    "replay": "runs.api",
    "report": "analysis.report",
    "resume": "runs.api",
    "run": "runs.api",
    "sweep": "runs.sweep",
    "trace": "submodels.tracing",
    "window_slices": "submodels.reductions",
    "windows": "submodels.reductions",
}
"""The module of each public name, imported on first use so that `import fedcover` is fast."""

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedcover' has no attribute {name!r}")
    return getattr(import_module(f"fedcover.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
