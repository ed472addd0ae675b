"""The command that lists names: list."""

from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import Annotated, Any

from cyclopts import Parameter

from fedcover.cli import console
from fedcover.cli.options import Json, app
from fedcover.data import datasets
from fedcover.data.client_data import RemoteData, SyntheticData
from fedcover.data.partition import PARTITIONS
from fedcover.errors import unknown
from fedcover.models import MODELS
from fedcover.policies import POLICIES
from fedcover.registry import options_of
from fedcover.runs.presets import PRESETS
from fedcover.server.aggregation import RULES
from fedcover.server.averaging import AVERAGES
from fedcover.server.optimizers import SERVERS
from fedcover.server.privacy import PRIVACY
from fedcover.training.engines import ENGINES
from fedcover.training.recipes import RECIPES
from fedcover.training.schedules import SCHEDULES

TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "policies": dict(POLICIES),
    "models": dict(MODELS),
    "datasets": {**datasets.DATASETS, "synthetic": SyntheticData},
    "partitions": {**PARTITIONS, "nodes": RemoteData},
    "engines": dict(ENGINES),
    "recipes": dict(RECIPES),
    "rules": dict(RULES),
    "servers": dict(SERVERS),
    "averages": dict(AVERAGES),
    "schedules": dict(SCHEDULES),
    "privacy": dict(PRIVACY),
}

FILLED_IN_OPTIONS = ("seed", "device", "precision", "make")
"""Options that the program fills in, or that have their own command-line option."""


@app.command(name="list")
def list_(
    kind: Annotated[str, Parameter(help=f"{', '.join([*TABLES, 'presets'])}.")],
    *,
    json: Json = False,
) -> None:
    """List the names of one kind, with their options and a short description."""
    if kind == "presets":
        return _list_presets(json)
    if kind not in TABLES:
        raise unknown("list", kind, [*TABLES, "presets"])
    entries: list[dict[str, Any]] = [
        {"name": name, "options": _options(function), "about": _first_paragraph(function)}
        for name, function in TABLES[kind].items()
    ]
    if json:
        return console.show_json(entries)
    rows = []
    for entry in entries:
        options = ", ".join(f"{name}={value!r}" for name, value in entry["options"].items())
        rows.append([entry["name"], options, entry["about"]])
    return console.table(kind, ["name", "options", "about"], rows)


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that a user can give, with their defaults."""
    return {
        name: "required" if parameter.default is parameter.empty else parameter.default
        for name, parameter in options_of(function).items()
        if name not in FILLED_IN_OPTIONS
    }


def _first_paragraph(function: Callable[..., Any]) -> str:
    return (getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")


def _list_presets(json: bool) -> None:
    """List the named systems, and the fields in which each differs from the defaults."""
    if json:
        entries = [
            {"name": name, "sets": dict(preset.changed), "about": preset.about}
            for name, preset in PRESETS.items()
        ]
        return console.show_json(entries)
    rows = []
    for name, preset in PRESETS.items():
        changes = ", ".join(f"{field} = {value}" for field, value in preset.changed.items())
        rows.append([name, preset.about, changes])
    return console.table("presets", ["name", "about", "sets"], rows)
