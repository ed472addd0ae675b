"""Sub-networks cut along whole units: nested prefixes, windows that roll, random draws.

Diao, Ding, Tarokh: HeteroFL (ICLR 2021). Alam, Liu, Yan, Zhang: FedRolex (NeurIPS 2022). Caldas, Konecny,
McMahan, Talwalkar: Expanding the reach of federated learning (Federated Dropout, 2018).
"""

from fedcover.errors import InvalidValue
from fedcover.policies.base import per_capacity, per_client, width
from fedcover.rng import key
from fedcover.submodels.reductions import Slices, drawn, windows
from fedcover.types import Client, View


@per_capacity
def full(view: View, capacity: float) -> Slices:
    """Every client trains the whole model, whatever its capacity: plain FedAvg, the upper baseline."""
    return windows(view.groups, 1.0)


@per_capacity
def homogeneous(view: View, capacity: float, *, share: float | None = None) -> Slices:
    """Every client trains the same small model: of width `share`, or what the fleet's smallest device holds."""
    if share is not None and not 0 < share <= 1:
        raise InvalidValue(f"policy homogeneous: share must be in (0, 1]; got {share}")
    return windows(view.groups, width(view, min(view.levels)) if share is None else share)


@per_capacity
def exclude(view: View, capacity: float, *, below: float | None = None) -> Slices | None:
    """Only clients of enough capacity take part, all with the same model: what one of capacity `below` holds.

    Without `below` only the largest devices train.
    """
    least = max(view.levels) if below is None else below
    if not 0 < least <= max(view.levels):
        raise InvalidValue(
            f"policy exclude: below must be in (0, {max(view.levels):g}], the largest; got {below}"
        )
    return windows(view.groups, width(view, least)) if capacity >= least else None


@per_capacity
def prefix(view: View, capacity: float) -> Slices:
    """The first units of every group: nested sub-networks that never change (HeteroFL)."""
    return windows(view.groups, width(view, capacity))


@per_client
def rolling(view: View, client: Client, *, spread: bool = False) -> Slices:
    """A window over every group that moves by one unit a round (FedRolex).

    With `spread` the clients of a cohort start at evenly spaced units instead of all at the same one.
    """
    offset = client.slot / len(view.cohort) if spread else 0.0
    start = {group.name: view.round + int(offset * group.size) for group in view.groups}
    return windows(view.groups, width(view, client.capacity), start)


@per_client
def random(view: View, client: Client) -> Slices:
    """A uniform random set of units, one draw per coupled group, client and round (Federated Dropout)."""
    return drawn(
        view.groups, width(view, client.capacity), key(view.seed, "random", view.round, client.id)
    )
