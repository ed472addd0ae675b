"""The job on pfl: torchrun --nproc-per-node=2 pfl_mnist.py JOB RESULT (or without torchrun: one
process).
"""

import itertools
import os
import sys
from importlib.metadata import version

import numpy as np
import torch
from common import BATCH, EPOCHS, LR, MOMENTUM, Job, Watch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
np.random.seed(0)
job = Job(sys.argv[1])
rounds, active = job.cohorts_RA.shape


class Network(torch.nn.Module):
    """The MLP with the two functions that pfl asks for."""

    def __init__(self):
        super().__init__()
        self.layers = job.model()

    def loss(self, x, y):
        """The mean loss of a batch."""
        return F.cross_entropy(self.layers(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        """How many answers are right."""
        right = (self.layers(x).argmax(1) == y).sum().item()
        return {"accuracy": Weighted(right, len(y))}


class Rows(Dataset):
    """A client's rows in the job's order: every call of `iter` is one epoch."""

    def __init__(self, round, slot):
        self.epochs = job.epochs(round, slot)
        self.size = job.rows_CN.shape[1]
        super().__init__(raw_data=(job.train_x[:1], job.train_y[:1]))

    def __len__(self):
        return self.size

    def iter(self, batch_size):
        """The batches of the next epoch; pfl also evaluates its first users, on all of their rows
        at once.
        """
        if batch_size != BATCH:
            return iter([(self.raw_data[0], self.raw_data[1])])
        x_N, y_N = next(self.epochs)
        return zip(x_N.split(batch_size), y_N.split(batch_size), strict=True)


class Clock(TrainingProcessCallback):
    """Record seconds and accuracy after each round; comes after the evaluation."""

    def __init__(self, evaluation):
        self.evaluation, self.watch = evaluation, Watch()

    def on_train_begin(self, *, model):
        """The clock starts when training does."""
        self.evaluation.on_train_begin(
            model=model
        )  # from which pfl learns that it may share the evaluation
        self.watch = Watch()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Evaluate, after the first round too, which pfl would leave out, and note."""
        stop, metrics = self.evaluation.after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration + 1
        )
        values = metrics.to_simple_dict(to_lowercase=True)
        self.watch.round(next(value for name, value in values.items() if "accuracy" in name))
        return stop, metrics


clients = itertools.cycle((round, slot) for round in range(rounds) for slot in range(active))
training = FederatedDataset(lambda place: Rows(*place), lambda: next(clients))
module = Network()
model = PyTorchModel(
    model=module,
    local_optimizer_create=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=MOMENTUM),
    central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
)
test = Dataset(raw_data=(job.test_x, job.test_y))
clock = Clock(CentralEvaluationCallback(test, NNEvalHyperParams(local_batch_size=10_000)))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=10**9,
        train_cohort_size=active,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=training, val_data=training, postprocessors=[]),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH
    ),
    callbacks=[clock],
)
if os.environ.get("RANK", "0") == "0":
    clock.watch.write(sys.argv[2], pfl=version("pfl"))
