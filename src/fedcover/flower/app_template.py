"""A Flower App for an experiment: a folder of a few lines, since nodes and server have fedcover installed."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

FLOWER = "1.41.0"
"""The version of Flower that this was tested with."""

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedcover-experiment"
version = "1.0.0"
description = "An experiment of fedcover."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={flower},<2"]

[tool.flwr.app]
publisher = "fedcover"
fab-format-version = 1
flwr-version-target = "{flower}"

[tool.flwr.app.components]
serverapp = "fedcover_experiment.server_app:app"
clientapp = "fedcover_experiment.client_app:app"

[tool.flwr.app.config]
{config}"""

MODULES = "modules"
"""The folder of the app in which the user's own modules travel; Python looks there first."""
_MODULE = f"""\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "{MODULES}"))
from fedcover.flower.{{side}} import experiment_app

app = experiment_app()
"""
_FILES = {
    "LICENSE": "Apache-2.0, as fedcover itself.\n",
    "fedcover_experiment/__init__.py": '"""An experiment of fedcover."""\n',
    **{
        f"fedcover_experiment/{side}_app.py": _MODULE.format(side=side)
        for side in ("server", "client")
    },
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a run on Flower is started with, beside the experiment itself; all of it fits Flower's run config."""

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

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RunConfig":
        """From Flower's run config, in which a whole number may stand for any."""
        fields: dict[str, Any] = {name: config[name] for name in cls.__dataclass_fields__}
        return cls(
            **{**fields, "deadline": float(fields["deadline"]), "wait": float(fields["wait"])}
        )


def write_app(
    folder: Path, settings: RunConfig, modules: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """Write the Flower App of a run into a folder; `flwr run` accepts it.

    Args:
        folder: Where the app is written.
        settings: What the run is started with.
        modules: The user's own modules that travel with it: the content of each file by its path.
    """
    # a JSON string, number or boolean is also TOML, but for the pairs in which JSON escapes rare signs
    config = "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in asdict(settings).items()
    )
    texts = {**_FILES, "pyproject.toml": _PROJECT.format(flower=FLOWER, config=config)}
    own = {f"{MODULES}/{path}": content for path, content in modules.items()}
    for name, content in {**{name: text.encode() for name, text in texts.items()}, **own}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder
