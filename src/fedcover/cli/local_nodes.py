"""The node configs of the SuperNodes that `fedcover flower up` starts on this machine."""

from pathlib import Path

from fedcover.errors import InvalidValue
from fedcover.flower.node_data import data_requirements, load_node_data
from fedcover.flower.nodes import clients_of, partition_of
from fedcover.runs.experiment import Experiment
from fedcover.runs.machine import Machine
from fedcover.runs.setup import prepare
from fedcover.types import Source


def complete_node_configs(
    experiment: Experiment,
    nodes: int,
    rows: str,
    common_config: dict[str, object],
    data_folder: str | Path | None,
) -> list[dict[str, object]]:
    """Return the nodes' configs. Preparing the run first reports what the server would reject."""
    setup = prepare(experiment, Machine("sequential", "cpu").resolved(), data=data_folder)
    data_configs = node_data_configs(experiment, rows, nodes, setup.task.source)
    return [
        {**config, **common_config, **data_config}
        for config, data_config in zip(node_configs(experiment, nodes), data_configs, strict=True)
    ]


def node_configs(experiment: Experiment, nodes: int) -> list[dict[str, object]]:
    """Return each node's partition, and its capacity where all its clients have the same."""
    configs: list[dict[str, object]] = []
    for partition_id in range(nodes):
        config: dict[str, object] = {"partition-id": partition_id, "num-partitions": nodes}
        if experiment.assignment == "device":
            capacities = _capacities_of_node(experiment, partition_id, nodes)
            if len(capacities) == 1:
                config["capacity"] = capacities.pop()
        configs.append(config)
    return configs


def _capacities_of_node(experiment: Experiment, partition_id: int, nodes: int) -> set[float]:
    fleet = experiment.scaled_fleet
    return {
        fleet.capacity(client)
        for client in range(experiment.clients)
        if partition_of(client, experiment.clients, nodes) == partition_id
    }


def node_data_configs(
    experiment: Experiment, pattern: str, nodes: int, source: Source
) -> list[dict[str, object]]:
    """Return each node's file of rows, where the experiment keeps rows on the nodes.

    The files are read here, so that a wrong file is reported before anything is started.
    """
    if experiment.partition != "nodes":
        if pattern:
            raise InvalidValue(
                f"rows are for partition 'nodes'; this experiment has {experiment.partition!r}"
            )
        return [{} for _ in range(nodes)]
    if "{}" not in pattern:
        raise InvalidValue(
            "rows must name each node's file, with {} for the node's number (from 0), such as"
            f" 'node-{{}}.npz', because the experiment has partition 'nodes'; got {pattern!r}"
        )
    configs: list[dict[str, object]] = []
    for partition_id in range(nodes):
        file = Path(pattern.replace("{}", str(partition_id))).resolve()
        clients = clients_of(partition_id, experiment.clients, nodes)
        requirements = data_requirements(source, experiment.clients)
        load_node_data(str(file), experiment, clients, requirements)
        configs.append({"rows": str(file)})
    return configs
