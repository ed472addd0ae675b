"""The job on Flower's simulation, ten nodes on two Ray actors: flower_mnist.py JOB RESULT."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).parent.resolve())  # for the actors
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}

from common import Watch, accuracy
from flower_client import app, job_of
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

PATH, RESULT = str(Path(sys.argv[1]).resolve()), sys.argv[2]


class Cohorts(FedAvg):
    """FedAvg whose cohorts are the job's: each node of a round is given one of its clients."""

    def configure_train(self, server_round, arrays, config, grid):
        """One message for each client of the cohort."""
        nodes = sorted(grid.get_node_ids())
        return [
            Message(
                content=RecordDict({
                    "arrays": arrays,
                    "config": ConfigRecord({"job": PATH, "round": server_round - 1, "slot": slot}),
                }),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
            )
            for slot, node in enumerate(nodes)
        ]  # fmt: skip


server = ServerApp()


@server.main()
def main(grid, context):
    """Run the rounds and note their time."""
    job = job_of(PATH)
    module = job.model()
    watch = Watch()

    def evaluate(server_round, arrays):
        nonlocal watch
        module.load_state_dict(arrays.to_torch_state_dict())
        test_accuracy = accuracy(job, module)
        if server_round == 0:
            watch = Watch()
        else:
            watch.round(test_accuracy)
        return MetricRecord({"accuracy": test_accuracy})

    strategy = Cohorts(fraction_evaluate=0.0, min_train_nodes=10, min_available_nodes=10)
    arrays = ArrayRecord(module.state_dict())
    strategy.start(grid, arrays, num_rounds=len(job.cohorts_RA), evaluate_fn=evaluate)
    watch.write(RESULT, flwr=version("flwr"), ray=version("ray"))


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=10,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False},
        },
    )
