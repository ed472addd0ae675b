"""The server: `CoverageStrategy` in the place of FedAvg."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from covered.task import build
from fedcover.data.datasets import load
from fedcover.flower import CoverageStrategy
from fedcover.server.evaluation import logits, score

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Average every parameter over the nodes that trained it, and evaluate on the server."""
    config = context.run_config
    strategy = CoverageStrategy(build(), str(config["policy"]))
    test = load("digits").test

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        test_score = score(logits(strategy.ready(arrays), test.x), test.y)
        return MetricRecord({"accuracy": test_score.accuracy, "loss": test_score.loss})

    result = strategy.start(
        grid,
        strategy.initial_arrays(),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
        evaluate_fn=evaluate,
    )
    last_metrics = result.evaluate_metrics_serverapp[int(config["num-server-rounds"])]
    print(f"covered: accuracy {last_metrics['accuracy']:.3f}")
