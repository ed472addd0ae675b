"""The task of an experiment on a node, prepared once for each run that a process works for.

A SuperNode has a new process started for every message, whatever its `--isolation`; that process
prepares its task once, for all clients of the message. Processes of Flower's simulation handle
many messages, and so does a program that calls the app itself. They prepare the task of a run for
its first message, and keep it until a message of another run comes. So a node's rows are read
again when its process or the run is started again, and no earlier.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from flwr.app import Context

from fedcover.flower.memory import release_memory
from fedcover.flower.messages import TaskRequest
from fedcover.flower.node_data import load_node_data
from fedcover.flower.nodes import DataRequirements, clients_of, read_node_config
from fedcover.runs.components import build_meta_model
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import Overrides, prepare_workload
from fedcover.submodels.unit_groups import groups_from_json
from fedcover.types import Task
from fedcover.version import __version__


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The rows that stay on a node: their file, whose they are, and what they must be like."""

    path: str
    clients: range
    requirements: DataRequirements


@dataclass(frozen=True, slots=True)
class TaskInputs:
    """All that the task of an experiment on a node depends on.

    Attributes:
        run_id: Flower's number of the run. Two runs never share a task, as the functions that
            both name may differ.
        experiment: The experiment.
        groups: The unit groups of a user's module, as JSON; empty for a model of fedcover.
        machine: The device and the threads.
        data: The folder of data sets, if the node has its own.
        rows: The node's rows, if clients' data are on nodes.
    """

    run_id: int
    experiment: Experiment
    groups: str
    machine: Machine
    data: str | None
    rows: NodeRows | None

    @classmethod
    def of(cls, request: TaskRequest, machine: Machine, context: Context) -> "TaskInputs":
        """Return the inputs that a request and a node's configuration name."""
        config = context.node_config
        experiment = Experiment.from_toml(request.experiment)
        rows = None
        if experiment.partition == "nodes":
            rows = _node_rows(request.extra_config, experiment, context.node_id, config)
        data = str(config["data"]) if config.get("data") else None
        return cls(context.run_id, experiment, request.groups, machine, data, rows)


def _node_rows(
    server_data: Mapping[str, Any], experiment: Experiment, node: int, config: Mapping[str, Any]
) -> NodeRows:
    """Return where a node's rows are, and what they must be like for the server's data."""
    info = read_node_config(node, config, __version__)
    clients = clients_of(info.partition_id, experiment.clients, info.num_partitions)
    requirements = DataRequirements(
        experiment.clients, server_data["classes"], tuple(server_data["shape"])
    )
    return NodeRows(str(config.get("rows", "")), clients, requirements)


def prepare_task(inputs: TaskInputs) -> Task:
    """Prepare the experiment for this node, with its own rows if clients' data are on nodes."""
    experiment, device = inputs.experiment, inputs.machine.device
    unit_groups = groups_from_json(inputs.groups) if inputs.groups else None
    build = partial(build_meta_model, known_groups=unit_groups)
    if inputs.rows is None:
        overrides = Overrides(build=build)
        return prepare_workload(experiment, device, data=inputs.data, overrides=overrides).task
    rows = inputs.rows
    source = load_node_data(rows.path, experiment, rows.clients, rows.requirements, device)
    return prepare_workload(
        experiment, device, overrides=Overrides(source=source, build=build)
    ).task


class LastTask:
    """The task of the last run of this process, and no other.

    Whoever works on the task has it alone: it is taken out, and put back afterwards. So two
    messages that are handled at once prepare two tasks.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entry: tuple[TaskInputs, Task] | None = None

    def take(self, inputs: TaskInputs) -> Task:
        """Return the task of these inputs; drop any other before this one is prepared."""
        with self._lock:
            entry, self._entry = self._entry, None
        if entry is not None and entry[0] == inputs:
            return entry[1]
        if entry is not None:
            del entry  # or two data sets would be in memory at once
            release_memory()  # also what its messages have left in reference cycles
        return prepare_task(inputs)

    def put(self, inputs: TaskInputs, task: Task) -> None:
        """Keep a task for the next message of its run."""
        with self._lock:
            self._entry = (inputs, task)


LAST_TASK = LastTask()
"""The one of this process."""
