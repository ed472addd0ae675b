"""Policies that keep whole units: nested prefixes, rolling windows, and random draws.

Diao, Ding, Tarokh: HeteroFL (ICLR 2021). Alam, Liu, Yan, Zhang: FedRolex (NeurIPS 2022). Caldas,
Konecny, McMahan, Talwalkar: Expanding the reach of federated learning (Federated Dropout, 2018).
"""

from fedcover.errors import InvalidValue
from fedcover.policies.base import per_capacity, per_client, width
from fedcover.rng import key
from fedcover.submodels.reductions import Slices, drawn, windows
from fedcover.types import Client, View


@per_capacity
def full(view: View, capacity: float) -> Slices:
    """Every client trains the whole model, regardless of capacity (FedAvg, the upper baseline)."""
    return windows(view.groups, 1.0)


@per_capacity
def homogeneous(view: View, capacity: float, *, share: float | None = None) -> Slices:
    """Every client trains the same small model.

    Its width is `share`, or by default what the smallest device of the fleet can hold.
    """
    if share is not None and not 0 < share <= 1:
        raise InvalidValue(f"policy homogeneous: share must be in (0, 1]; got {share}")
    return windows(view.groups, width(view, min(view.levels)) if share is None else share)


@per_capacity
def exclude(view: View, capacity: float, *, below: float | None = None) -> Slices | None:
    """Only clients of sufficient capacity take part, all with the same model.

    Clients with a capacity less than `below` sit out. The others train what a device of capacity
    `below` can hold. Without `below` only the largest devices train.
    """
    threshold = max(view.levels) if below is None else below
    if not 0 < threshold <= max(view.levels):
        raise InvalidValue(
            f"policy exclude: below must be in (0, {max(view.levels):g}], the largest; got {below}"
        )
    if capacity < threshold:
        return None
    return windows(view.groups, width(view, threshold))


@per_capacity
def prefix(view: View, capacity: float) -> Slices:
    """Keep the first units of every group: nested sub-models that never change (HeteroFL)."""
    return windows(view.groups, width(view, capacity))


@per_client
def rolling(view: View, client: Client, *, spread: bool = False) -> Slices:
    """Keep a window of every group that moves by one unit per round (FedRolex).

    With `spread` the windows of a cohort start at evenly spaced units instead of the same one.
    """
    offset = client.slot / len(view.cohort) if spread else 0.0
    starts = {group.name: view.round + int(offset * group.size) for group in view.groups}
    return windows(view.groups, width(view, client.capacity), starts)


@per_client
def random(view: View, client: Client) -> Slices:
    """Keep uniformly random units, drawn for each group, client and round (Federated Dropout)."""
    seed = key(view.seed, "random", view.round, client.id)
    return drawn(view.groups, width(view, client.capacity), seed)
