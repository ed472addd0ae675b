"""Which node holds which clients, and how much it can hold: what a node says of itself, and who is there."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcover.errors import InvalidValue
from fedcover.flower.input_scales import Scale

if TYPE_CHECKING:  # it knows torch, without which an introduction is quick
    from fedcover.data.client_data import Holding


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node says of itself: its place among the nodes, what it can hold, and with which version it works.

    A node that names no place has place -1 of 0, until the roster gives it one. `holdings` are the rows that it has,
    client by client, where clients' rows are on nodes, and `scale` is that of their inputs, if it tells.
    """

    node: int
    place: int
    places: int
    capacity: float | None
    version: str
    holdings: Sequence["Holding"] = ()
    scale: Scale | None = None

    @property
    def partition(self) -> str:
        """The place in words.

        >>> Introduction(7, 1, 4, None, "1").partition, Introduction(7, *NO_PLACE, None, "1").partition
        ('partition 1 of 4', 'no partition')
        """
        if self.place < 0:
            return "no partition"
        return f"partition {self.place} of {self.places}" if self.places else f"partition {self.place}"


NO_PLACE = (-1, 0)
"""Place and number of places of a node whose configuration names neither."""


def introduction(node: int, config: Mapping[str, Any], version: str) -> Introduction:
    """Read a node's configuration: `partition-id` and `num-partitions`, or neither, and, if it is there, `capacity`.

    >>> introduction(7, {"partition-id": 1, "num-partitions": 4, "capacity": 0.25}, "1.0").capacity
    0.25
    """
    place, places = config.get("partition-id"), config.get("num-partitions")
    if place is None and places is None:
        place, places = NO_PLACE
    elif not isinstance(place, int) or not isinstance(places, int) or not 0 <= place < places:
        raise InvalidValue(
            "a SuperNode needs --node-config 'partition-id=K num-partitions=N' with K in 0..N-1, or neither of them; "
            f"got partition-id {place!r}, num-partitions {places!r}"
        )
    capacity = config.get("capacity")
    if capacity is not None and (not isinstance(capacity, int | float) or not 0 < capacity <= 1):
        raise InvalidValue(f"capacity in --node-config must be in (0, 1]; got {capacity!r}")
    return Introduction(node, place, places, None if capacity is None else float(capacity), version)


def place_of(client: int, clients: int, places: int) -> int:
    """The place that holds a client: neighbours together, places as equal as can be.

    >>> [place_of(client, 5, 2) for client in range(5)]
    [0, 0, 0, 1, 1]
    """
    return client * places // clients


def clients_of(place: int, clients: int, places: int) -> range:
    """The clients that a place holds: those whose `place_of` it is.

    >>> clients_of(1, 5, 2)
    range(3, 5)
    """
    first, end = (-(-border * clients // places) for border in (place, place + 1))
    return range(first, end)


def declared_fleet(introductions: Iterable[Introduction], clients: int, fallback: Sequence[float]) -> str:
    """The fleet that the nodes declare; a client whose node declares nothing has the capacity of the fallback.

    Of several nodes that claim one place the first counts, as it does for who answers.

    >>> declared_fleet([Introduction(7, 0, 2, 0.25, "1")], 4, [1.0, 1.0, 1.0, 0.5])
    '2x0.25 + 1x1.0 + 1x0.5'
    """
    first: dict[int, Introduction] = {}
    for known in introductions:
        first.setdefault(known.place, known)
    said = {place: known.capacity for place, known in first.items() if known.capacity is not None}
    places = next((first[place].places for place in said), 1)
    capacities = [said.get(place_of(client, clients, places), fallback[client]) for client in range(clients)]
    alike = [(len(list(group)), np.format_float_positional(share, trim="0")) for share, group in groupby(capacities)]
    return " + ".join(f"{count}x{share}" for count, share in alike)  # no exponents: a fleet is not written with them


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rows that are on nodes must be like: of so many clients together, with labels and a shape that fit.

    `scale` is that of the server's inputs; rows of another one are taken with a warning.
    """

    clients: int
    classes: int
    shape: tuple[int, ...]
    scale: Scale | None = None

    def objection(self, told: Sequence["Holding"], mine: range) -> str:
        """Why rows are not those of some of the clients; nothing if they are."""
        if not told:
            return (
                "the rows of this experiment are on its nodes (partition 'nodes'): each needs its own, --node-config "
                "'rows=\"/path/of/file.npz\" ...', a file with train_x, train_y and, for several clients, train_owner"
            )
        if len(told) != len(mine):
            return (
                f"rows must be of {len(mine)} owners, as many as this node has of the {self.clients} clients "
                f"(train_owner says whose each is; without it all are of one); got {len(told)}"
            )
        if told[0].shape != self.shape:
            return f"train_x must have rows of shape {self.shape}, as the server has; got {told[0].shape}"
        most = max(max(holding.labels, default=0) for holding in told)
        if most >= self.classes:
            return f"train_y must be labels 0 to {self.classes - 1}, as the server has; got {most}"
        return ""

    def doubt(self, scale: Scale | None) -> str:
        """Why rows may mean something else than the server's; nothing if they need not, or nobody tells."""
        if scale is None or self.scale is None or not scale.differs(self.scale):
            return ""
        return (
            f"its inputs seem to be scaled differently: {scale}; the server's are {self.scale}. It is taken all the "
            "same: numbers must mean the same everywhere"
        )


@dataclass
class Roster:
    """Who has introduced itself, in that order, who was refused, how often others were asked, and who was silent last.

    Two nodes may claim one place: a SuperNode that comes back may be a new node to Flower. The first claim holds while
    its node answers, so that nobody takes the place of a node that works. Where clients must keep their `capacities`, a
    node that holds less than those of its place is refused. Where clients' rows are on nodes,
    `wanted` says what these must be like, and `holdings` is what is known of them.

    A `movable` node is one that names no place. It gets the one with the fewest claims that it can hold, and another
    one when nobody answers for that. There are `places` of them, or, if it is `unlimited`, as many as nodes have come.
    """

    places: int | None = None
    capacities: Sequence[float] = ()
    wanted: Wanted | None = None
    holdings: dict[int, "Holding"] = field(default_factory=dict)
    known: dict[int, Introduction] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    asked: Counter[int] = field(default_factory=Counter)
    silent: set[int] = field(default_factory=set)
    here: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    unlimited: bool = False
    movable: set[int] = field(default_factory=set)

    def strangers(self, present: Collection[int]) -> list[int]:
        """The nodes of those that are present that must say who they are: new ones, and such as may have changed."""
        settled = (self.here & self.known.keys() - self.doubtful) | self.refused
        return sorted(set(present) - settled)

    def moves(self, present: Collection[int]) -> Iterator[tuple[str, Introduction]]:
        """Who of those that are known has come since the last look, or has left."""
        for node, introduced in self.known.items():
            if (node in present) != (node in self.here):
                yield ("came" if node in present else "left"), introduced
        self.here = self.known.keys() & set(present)

    def members(self, present: Collection[int], fallback: Sequence[float]) -> dict[int, float]:
        """The clients whose node is present, with the capacity that it declares; else that of the fallback.

        >>> roster = Roster(places=2, known={7: Introduction(7, 1, 2, 0.25, "1")})
        >>> roster.members({7}, [1.0, 1.0, 1.0, 1.0])
        {2: 0.25, 3: 0.25}
        """
        clients = len(fallback)
        found: dict[int, float] = {}
        for place, node in sorted(self.holders(present).items()):
            declared = self.known[node].capacity
            mine = clients_of(place, clients, self.places or 1)
            found |= {client: fallback[client] if declared is None else declared for client in mine}
        return found

    def add(self, introduced: Introduction, present: Collection[int] = ()) -> None:
        """Remember a node; refused if it counts other places than the rest, or holds too little for its clients.

        `present` are the nodes whose places are not free.
        """
        if introduced.place < 0:
            introduced = self._placed(introduced, present)
        self.places = self.places or introduced.places or None
        if introduced.places != (self.places or 0):
            raise InvalidValue(f"num-partitions must be {self.places}, as elsewhere; got {introduced.places}")
        place = introduced.place
        if not self._fits(introduced, place):
            raise InvalidValue(
                f"capacity must be at least {self._needed(place):g}, as the clients of partition {place} have had "
                f"since the run began; got {introduced.capacity:g} (a new run would take it)"
            )
        if self.wanted is not None:
            self._note_rows(
                introduced, self.wanted, clients_of(introduced.place, self.wanted.clients, introduced.places)
            )
        self.known[introduced.node] = introduced
        self.doubtful.discard(introduced.node)
        self.asked[introduced.node] = 0  # it answers, so it may be asked again when it has been away

    def _placed(self, introduced: Introduction, present: Collection[int]) -> Introduction:
        """The same node with a place of its own."""
        if self.wanted is not None:
            raise InvalidValue(
                "a node with rows of its own needs --node-config 'partition-id=K num-partitions=N', so that its "
                "clients are the same whenever it comes"
            )
        if self.places is None and not self.unlimited:
            raise InvalidValue(
                "a node without partition-id needs a run that says how many nodes share the clients (--nodes N)"
            )
        self.movable.add(introduced.node)
        before = self.known.get(introduced.node)
        place = self._free_place(introduced, present) if before is None else before.place
        return replace(introduced, place=place, places=self.places or 0)

    def _free_place(self, introduced: Introduction, present: Collection[int]) -> int:
        claims = Counter(
            known.place for node, known in self.known.items() if node in present and node not in self.silent
        )
        places = range(self.places or len(self.known) + 1)
        fitting = [place for place in places if self._fits(introduced, place)]
        return min(fitting or places, key=lambda place: (claims[place], place))

    def fill(self, present: Collection[int]) -> None:
        """Give places that nobody answers for to movable nodes that have nothing to answer for."""
        holders = self.holders(present)
        busy = set(holders.values())
        spare = [node for node in self.known if node in present and node in self.movable - self.silent - busy]
        for place in range(self.places or 0):
            if holders.get(place) in self.silent | {None}:
                node = next((node for node in spare if self._fits(self.known[node], place)), None)
                if node is not None:
                    spare.remove(node)
                    self.known[node] = replace(self.known[node], place=place)

    def _note_rows(self, introduced: Introduction, wanted: Wanted, mine: range) -> None:
        if objection := wanted.objection(introduced.holdings, mine):
            raise InvalidValue(objection)
        others = (known for node, known in self.known.items() if node not in self.silent)
        if all(known.place != introduced.place for known in others):
            self.holdings.update(zip(mine, introduced.holdings, strict=True))

    def _fits(self, introduced: Introduction, place: int) -> bool:
        return introduced.capacity is None or introduced.capacity >= self._needed(place)

    def _needed(self, place: int) -> float:
        mine = clients_of(place, len(self.capacities), self.places or 1)
        return max((self.capacities[client] for client in mine), default=0.0)

    def holders(self, present: Iterable[int]) -> dict[int, int]:
        """The node that answers for each place, among those that are present."""
        here = set(present)
        candidates = [node for node in self.known if node in here]
        holders: dict[int, int] = {}
        for node in sorted(candidates, key=lambda node: node in self.silent):  # stable: else by order of claims
            holders.setdefault(self.known[node].place, node)
        return holders
