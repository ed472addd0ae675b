"""The client of `flower_mnist.py`: a module of its own, so that actors import it and nothing
travels but messages.
"""

from functools import cache

import torch
from common import Job, train
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def job_of(path):
    """The job, read once in every process."""
    torch.set_num_threads(1)
    return Job(path)


@app.train()
def fit(message, context):
    """Train one client of the cohort."""
    config = message.content["config"]
    job = job_of(config["job"])
    module = job.model()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(job, module, config["round"], config["slot"])
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": job.rows_CN.shape[1]}),
    }
    return Message(content=RecordDict(content), reply_to=message)
