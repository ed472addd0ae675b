"""Models of the zoo, each traced once."""

import pytest
import torch

from fedcover.submodels.tracing import trace
from tests.helpers.zoo import zoo


@pytest.fixture(autouse=True)
def seeded():
    """The same weights and inputs every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def traced():
    """Groups of the models of the zoo, each traced once."""
    tensors = {}

    def groups_of(name):
        if name not in tensors:
            tensors[name] = trace(*zoo(name))
        return tensors[name]

    return groups_of
