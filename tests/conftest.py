"""One thread per test process: small steps wait for each other more than they work."""

import torch

torch.set_num_threads(1)
