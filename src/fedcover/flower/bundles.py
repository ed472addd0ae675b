"""A Flower App for an experiment: a folder of a few lines, since nodes and server have fedcover installed."""

import json
from dataclasses import asdict
from pathlib import Path

from fedcover.flower.server import Settings

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

_FILES = {
    "LICENSE": "Apache-2.0, as fedcover itself.\n",
    "fedcover_experiment/__init__.py": '"""An experiment of fedcover."""\n',
    "fedcover_experiment/server_app.py": "from fedcover.flower.server import experiment_app\n\napp = experiment_app()\n",
    "fedcover_experiment/client_app.py": "from fedcover.flower.client import experiment_app\n\napp = experiment_app()\n",
}


def write_app(folder: Path, settings: Settings) -> Path:
    """Write the Flower App of a run into a folder; `flwr run` accepts it."""
    # a JSON string, number or boolean is also TOML
    config = "".join(f"{name} = {json.dumps(value)}\n" for name, value in asdict(settings).items())
    for name, content in {**_FILES, "pyproject.toml": _PROJECT.format(flower=FLOWER, config=config)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder
