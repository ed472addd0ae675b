"""The command that measures a device: capacity."""

import sys
from typing import Annotated

from cyclopts import Parameter

from fedcover.analysis.device_capacity import Proposal, propose
from fedcover.cli import console
from fedcover.cli.options import (
    Data,
    Device,
    ExperimentFile,
    Json,
    Set,
    Threads,
    Whole,
    app,
    load_experiment,
)
from fedcover.errors import InvalidValue
from fedcover.flower.node_data import MAX_LABELS, load_standalone_node_data
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, build_setup, prepare_workload

MAX_MEGABYTES = 1e9

TRIAL_COLUMNS = {
    "capacity": "capacity",
    "parameters": "parameters",
    "memory": "memory (bytes)",
    "step_seconds": "seconds per step",
    "round_seconds": "seconds per round",
}
"""Fields of a trial and their headings."""


@app.command
def capacity(
    experiment: ExperimentFile = None,
    *,
    set: Set = (),
    memory: Annotated[
        float | None, Parameter(help="Megabytes that training may use (default: what is free).")
    ] = None,
    seconds: Annotated[
        float | None, Parameter(help="Longest local training time of one round.")
    ] = None,
    data: Data = None,
    rows: Annotated[str, Parameter(help="With partition 'nodes': this node's file of rows.")] = "",
    classes: Annotated[
        Whole | None, Parameter(help="With --rows: number of labels over all nodes.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure how much of the model this device can train, and propose a capacity."""
    if memory is not None and not 0 < memory < MAX_MEGABYTES:
        raise InvalidValue(f"memory must be a number of megabytes above 0; got {memory:g}")
    config = load_experiment(experiment, set)
    machine = Machine(device=device, threads=threads).resolved()
    _check_rows(config.partition, rows, classes)
    overrides = _local_rows(config, rows, classes, machine.device) if rows else None
    workload = prepare_workload(config, machine.device, data=data, overrides=overrides)
    machine = machine.for_workload(workload)
    setup = build_setup(config, workload, machine, overrides)
    memory_limit = None if memory is None else int(memory * 1e6)
    with machine.applied():
        proposal = propose(setup, memory=memory_limit, seconds=seconds, tell=console.notify)
    if json:
        return console.show_json(proposal.as_dict())
    _show_proposal(proposal, config.model)
    if proposal.capacity is None:
        sys.exit(1)
    return None


def _check_rows(partition: str, rows: str, classes: int | None) -> None:
    """Check that --rows and --classes are given where, and only where, they are needed."""
    if partition == "nodes" and not rows:
        raise InvalidValue(
            "--rows FILE is needed: the experiment has partition 'nodes',"
            " so this node has rows of its own"
        )
    if rows and partition != "nodes":
        raise InvalidValue(f"--rows is for partition 'nodes'; this experiment has {partition!r}")
    if classes is not None and not rows:
        raise InvalidValue("--classes goes with --rows, which is not given")
    if classes is not None and not 1 <= classes <= MAX_LABELS:
        raise InvalidValue(f"--classes must be in 1..{MAX_LABELS}; got {classes}")


def _local_rows(experiment: Experiment, rows: str, classes: int | None, device: str) -> Overrides:
    """Load this node's rows, and print their shape and the number of labels."""
    source = load_standalone_node_data(rows, experiment, classes, device)
    remark = "" if classes else ", as these rows have; if others have more: --classes"
    console.notify(
        f"rows of shape {tuple(source.test.x.shape[1:])},"
        f" and a model for {source.classes} labels{remark}"
    )
    return Overrides(source=source)


def _show_proposal(proposal: Proposal, model: str) -> None:
    rows = []
    for trial in proposal.trials:
        fields = [getattr(trial, field) for field in TRIAL_COLUMNS]
        rows.append([*fields, "yes" if trial.fits else "no"])
    title = f"{model} on this device, {proposal.memory_free:,} bytes free"
    console.table(title, [*TRIAL_COLUMNS.values(), "fits"], rows)
    if proposal.capacity is None:
        print("no capacity fits this device")
    else:
        share = f"{proposal.capacity:g}"
        print(f"proposed capacity: {share} (on a SuperNode: --node-config 'capacity={share} ...')")
