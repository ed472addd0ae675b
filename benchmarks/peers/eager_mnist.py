"""The job as a plain eager loop, without any framework: eager_mnist.py JOB RESULT."""

import sys

import torch
from common import Job, Watch, accuracy, train

torch.set_num_threads(1)
job = Job(sys.argv[1])
server = job.model()
watch = Watch()
for round, cohort in enumerate(job.cohorts_RA):
    start = {name: tensor.clone() for name, tensor in server.state_dict().items()}
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for slot in range(len(cohort)):
        server.load_state_dict(start)
        train(job, server, round, slot)
        for name, tensor in server.state_dict().items():
            total[name] += tensor
    server.load_state_dict({name: tensor / len(cohort) for name, tensor in total.items()})
    watch.round(accuracy(job, server))
watch.write(sys.argv[2])
