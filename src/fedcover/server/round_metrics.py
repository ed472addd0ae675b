"""What a round's reductions say, whatever was learnt with them: coverage, noise, cost, pictures."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedcover.submodels import coverage as cov
from fedcover.submodels.cost import Cost, cost
from fedcover.submodels.coverage_maps import round_coverage_maps
from fedcover.types import Coverage, Params, Update


def round_metrics(
    params: Params, coverage: Coverage, updates: Sequence[Update], uses: Mapping[str, int]
) -> dict[str, Any]:
    """The figures of a round: `params` before it, `coverage` after it."""
    counts = coverage.window[-1]
    prices: dict[tuple[int, int], Cost] = {}
    for u in updates:
        key = id(u.sent), id(u.trained)
        prices[key] = prices.get(key) or cost(u.sent, params, uses, u.trained)
    paid = [prices[id(u.sent), id(u.trained)] for u in updates]
    drawn = round_coverage_maps(counts, updates)  # what needs a GPU least comes first: it may still be evaluating
    delta2 = cov.delta2(params, [u.sent for u in updates])
    return {
        "gamma_round": cov.minimum(counts),
        "gamma_window": cov.minimum(cov.over_window(coverage)),
        "histogram": {str(k): v for k, v in cov.histogram(counts).items()},
        "clients": {
            str(u.client.id): {"capacity": u.client.capacity, "delta2": noise, "loss": u.loss}
            for u, noise in zip(updates, delta2, strict=True)
        },
        "delta2_mean": fmean(delta2) if updates else None,
        "parameters": fmean(c.parameters for c in paid) if paid else None,
        "multiply_adds": fmean(c.multiply_adds for c in paid) if paid else None,
        "bytes_down": sum(c.bytes_down for c in paid),
        "bytes_up": sum(c.bytes_up for c in paid),
        "pictures": drawn,
    }
