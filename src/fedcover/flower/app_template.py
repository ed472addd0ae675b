"""Write the Flower App of an experiment: a few lines, as all machines have fedcover."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from fedcover.flower import OLDEST, SUPPORTED

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedcover-experiment"
version = "1.0.0"
description = "An experiment of fedcover."
license = {{ file = "LICENSE" }}
dependencies = ["flwr{supported}"]

[tool.flwr.app]
publisher = "fedcover"
fab-format-version = 1
flwr-version-target = "{oldest}.0"

[tool.flwr.app.components]
serverapp = "fedcover_experiment.server_app:app"
clientapp = "fedcover_experiment.client_app:app"

[tool.flwr.app.config]
{config}"""

MODULES = "modules"
"""The folder of the user's own modules in the app; Python searches it first."""
_COMPONENT = f"""\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "{MODULES}"))
from fedcover.flower.{{side}} import experiment_app

app = experiment_app()
"""
_FILES = {
    "LICENSE": "Apache-2.0, as fedcover itself.\n",
    "fedcover_experiment/__init__.py": '"""An experiment of fedcover."""\n',
    "fedcover_experiment/server_app.py": _COMPONENT.format(side="server"),
    "fedcover_experiment/client_app.py": _COMPONENT.format(side="client"),
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Flower's run config of an experiment, with the options of the run."""

    experiment: str
    folder: str
    resume: bool = False
    overwrite: bool = False
    data: str = ""
    device: str = "auto"
    threads: int = 0
    nodes: int = 0
    deadline: float = 300.0
    wait: float = 120.0
    launch: str = ""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RunConfig":
        """Read Flower's run config, in which a float may be written as a whole number."""
        fields: dict[str, Any] = {name: config[name] for name in cls.__dataclass_fields__}
        fields["deadline"] = float(fields["deadline"])
        fields["wait"] = float(fields["wait"])
        return cls(**fields)


def write_app(
    folder: Path, settings: RunConfig, modules: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """Write a Flower App that `flwr run` accepts.

    Args:
        folder: Where to write the app.
        settings: The options of the run.
        modules: The files of the user's own modules, by path.

    Returns:
        The folder.
    """
    config = tomli_w.dumps(asdict(settings))
    project = _PROJECT.format(supported=SUPPORTED, oldest=OLDEST, config=config)
    texts = {**_FILES, "pyproject.toml": project}
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"{MODULES}/{path}": content for path, content in modules.items()}
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
