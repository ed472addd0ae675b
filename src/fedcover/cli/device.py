"""Commands for a fleet at work: watch, capacity."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis.device_capacity import propose
from fedcover.cli import console
from fedcover.cli.live_view import read_run_view, render, watch_live
from fedcover.cli.options import Data, Device, Json, Threads, Whole, app, load_experiment
from fedcover.errors import InvalidValue
from fedcover.flower.node_data import MOST_LABELS, load_standalone_node_data
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare


@app.command
def watch(
    folder: Path,
    *,
    once: Annotated[
        bool, Parameter(help="Print one picture and leave; so does a pipe.", negative="")
    ] = False,
    every: Annotated[float, Parameter(help="Seconds between pictures.")] = 1.0,
    json: Json = False,
) -> None:
    """A run as it goes: rounds, accuracy, coverage, who answered, who was rejected and why."""
    if not 0.1 <= every <= 3600:
        raise InvalidValue(f"every must be in 0.1..3600 seconds; got {every:g}")
    if json:
        return console.show_json(read_run_view(folder).summary())
    if once or not sys.stdout.isatty():
        return console.output().print(render(read_run_view(folder)))
    with contextlib.suppress(KeyboardInterrupt):
        watch_live(folder, every)
    return None


MOST_MEGABYTES = 1e9


def _check_rows(partition: str, rows: str, classes: int | None) -> None:
    """Refuse rows, or how many labels they have, where there is no place for them, or no rows where they are needed."""
    if partition == "nodes" and not rows:
        raise InvalidValue(
            "--rows FILE is needed: the experiment has partition 'nodes', so this node's rows are its own"
        )
    if rows and partition != "nodes":
        raise InvalidValue(f"--rows is for partition 'nodes'; this experiment has {partition!r}")
    if classes is not None and not rows:
        raise InvalidValue("--classes goes with --rows, which is not given")
    if classes is not None and not 1 <= classes <= MOST_LABELS:
        raise InvalidValue(f"--classes must be in 1..{MOST_LABELS}; got {classes}")


@app.command
def capacity(
    experiment: Annotated[
        Path | None, Parameter(help="A TOML file; without it, the defaults.")
    ] = None,
    *,
    set: Annotated[
        tuple[str, ...], Parameter(help="key=value, overrides the file; may be repeated.")
    ] = (),
    memory: Annotated[
        float | None, Parameter(help="Megabytes that training may take; else what is free.")
    ] = None,
    seconds: Annotated[float | None, Parameter(help="Longest local training of one round.")] = None,
    data: Data = None,
    rows: Annotated[str, Parameter(help="With partition 'nodes': this node's file of rows.")] = "",
    classes: Annotated[
        Whole | None, Parameter(help="With --rows: how many labels there are on all nodes.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """How much of the experiment's model this device can train: a short benchmark that proposes a capacity."""
    if memory is not None and not 0 < memory < MOST_MEGABYTES:
        raise InvalidValue(f"memory must be a number of megabytes above 0; got {memory:g}")
    wanted = load_experiment(experiment, set)
    machine = Machine(device=device, threads=threads).resolved()
    _check_rows(wanted.partition, rows, classes)
    own = (
        Overrides(source=load_standalone_node_data(rows, wanted, classes, machine.device))
        if rows
        else None
    )
    if own and own.source:
        as_here = "" if classes else ", as these rows have; if others have more: --classes"
        console.notify(
            f"rows of shape {tuple(own.source.test.x.shape[1:])}, and a model for {own.source.classes} labels{as_here}"
        )
    setup = prepare(wanted, machine, data=data, overrides=own)
    with machine.for_setup(setup).applied():
        limit = None if memory is None else int(memory * 1e6)
        found = propose(setup, memory=limit, seconds=seconds, tell=console.notify)
    if json:
        return console.show_json(found.as_dict())
    columns = ["capacity", "parameters", "memory", "step_seconds", "round_seconds"]
    heads = [
        "capacity",
        "parameters",
        "memory (bytes)",
        "seconds a step",
        "seconds a round",
        "fits",
    ]
    table = [
        [*(getattr(trial, column) for column in columns), "yes" if trial.fits else "no"]
        for trial in found.trials
    ]
    console.table(f"{wanted.model} on this device, {found.memory_free:,} bytes free", heads, table)
    if found.capacity is None:
        print("no capacity fits this device")
        sys.exit(1)
    else:
        print(
            f"proposed capacity: {found.capacity:g} (on a SuperNode: --node-config 'capacity={found.capacity:g} ...')"
        )
    return None
