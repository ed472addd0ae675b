"""The fast engines, and a log that has said nothing yet."""

import pytest

from fedcover.training.engines.streams import streams
from tests.helpers.engines import UNCOMPILED

FAST = {"batched": UNCOMPILED, "streams": streams}


@pytest.fixture(params=FAST.values(), ids=FAST.keys())
def fast(request):
    """An engine that trains many clients at once."""
    return request.param


@pytest.fixture(autouse=True)
def _fresh_log(no_warnings_yet):
    """Every test starts with a log that has warned of nothing."""
