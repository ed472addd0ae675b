"""Places where clients train, kept from round to round: a lane, its stream, and steps that were made fast once.

`compiled` is for the CPU: one function for a whole step. `captured` is for CUDA: the kernels of a step as one graph.
"""

import logging
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.errors import TrainingDiverged
from fedcover.training.engines.buffers import Answer, Arrival, Lane, Shape, new_lane
from fedcover.training.engines.cpu_kernels import use_own_products
from fedcover.training.engines.fingerprint import fingerprint
from fedcover.training.engines.sgd_step import Slots, Track, Unfit, leaves_of, map_trees, observes
from fedcover.types import Task, Update

log = logging.getLogger("fedcover")
_SAID: set[str] = set()

PRECISIONS = ("fp32", "tf32", "bf16")
"""What the inside of a step is computed in. Parameters, momentum and sums stay in float32 (or wider) always."""

MOST_PLACES = 64
"""Places that a pool keeps; the one that was used longest ago goes first."""

LEAST_FREE = 0.15
"""The share of a GPU's memory that must be free before a place is added; else places that wait for clients go."""

Make = Callable[[Lane, int], Callable[[], None]]
"""From a lane and a batch size to a function that makes the next step; it may spoil what is in the lane."""


class Uncompiled(Unfit):
    """A step that the compiler does not take, or for which there is none: trying again would take seconds and fail."""


@dataclass(slots=True, eq=False)
class Place:
    """A lane with its fast steps, one for each batch size; on CUDA everything in it happens on its own stream."""

    lane: Lane
    make: Make
    precision: str
    stream: Any = None
    steps: dict[int, Callable[[], None]] = field(default_factory=dict)
    plan: Sequence[int] = ()

    def load(self, clients: Sequence[Arrival]) -> None:
        """Let clients in, and see to it that all of their steps can be made."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with on(self.stream):
            self.lane.load(clients)
            self.plan = self.lane.batches()
            if self.prepare(self.plan):
                self.lane.load(clients)

    def prepare(self, sizes: Iterable[int]) -> bool:
        """Make steps of these batch sizes fast, if they are not; whether that has spoilt what is in the lane."""
        new = [size for size in dict.fromkeys(sizes) if size not in self.steps]
        for size in new:
            with computing(self.precision, self.lane.slots.x.device), choosing_kernels():
                _try(self.lane, size)
                self.steps[size] = self.make(self.lane, size)
        return bool(new)

    def advance(self, step: int) -> None:
        """Make a step, if the clients here have so many."""
        if step < len(self.plan):
            with on(self.stream), computing(self.precision, self.lane.slots.x.device):
                self.steps[self.plan[step]]()

    def answers(self) -> list[Answer]:
        """What comes of the clients here."""
        with on(self.stream):
            made = list(self.lane.answers())
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return made


def on(stream: Any) -> AbstractContextManager[Any]:
    """Do what follows on a CUDA stream; on a CPU there is none, and asking torch for it takes longer than a kernel."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Compute in bf16 where that is asked for; whether float32 means tf32 is the machine's setting."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def choosing_kernels() -> AbstractContextManager[Any]:
    """Let cuDNN try its kernels and take the fastest, unless runs must repeat bit for bit."""
    try_all = not torch.are_deterministic_algorithms_enabled()
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=try_all, deterministic=not try_all, allow_tf32=torch.backends.cudnn.allow_tf32
    )


def _try(lane: Lane, size: int) -> None:
    """Make one step as it stands; whatever goes wrong, any random draw and any trace in Python makes the lane unfit."""
    before, remembered = _random_state(lane.slots.x.device), fingerprint(lane.module)
    lane.rewind(size)
    with unfit_if_it_fails():
        lane.step(lane.slots, lane.tracks[size])
    if before != _random_state(lane.slots.x.device):
        raise Unfit("the model draws random numbers for each client (dropout)")
    try:
        now = fingerprint(lane.module)
    except Unfit:  # it has kept something of the step that cannot be looked at outside
        now = b""
    if remembered != now:
        raise Unfit("the model changes what it holds in Python while it computes, which a step in place would miss")


@contextmanager
def unfit_if_it_fails() -> Iterator[None]:
    """A step of an own module may raise anything; `sequential` will raise it again if it matters."""
    try:
        yield
    except Unfit:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise Unfit(f"its step cannot be replayed ({type(error).__name__}: {why:.100})") from error


def _random_state(device: torch.device) -> tuple[object, ...]:
    """Where the generators stand that a model may draw from: torch's, Python's and NumPy's."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    numpys = np.random.get_state(legacy=False)["state"]
    return state.numpy().tobytes(), random.getstate(), numpys["key"].tobytes(), numpys["pos"]


# ── making steps fast ───────────────────────────────────────────────────────────────────────────────────


def plainly(lane: Lane, size: int) -> Callable[[], None]:
    """The step as it stands."""
    return lambda: lane.step(lane.slots, lane.tracks[size])


def compiled(lane: Lane, size: int) -> Callable[[], None]:
    """The step as one compiled function; a rest of a few rows is not worth compiling.

    It is traced to a list of operations on the lane's tensors first, whatever Python a model and a recipe are made of.
    The compiler gets that list itself, not through `torch.compile`, which would look at each call anew: these tensors
    stay what they are.
    """
    plain = plainly(lane, size)
    if size != lane.shape.local.batch_size:
        return plain
    tree = _fields(lane.slots), _fields(lane.tracks[size])
    leaves = leaves_of(tree)
    numbers = sum(prod(shape) for _, shape in lane.shape.tensors)
    log.info("engine: compiling, once, the step of %d clients with %s parameters each", lane.crew or 1, f"{numbers:,}")

    def step(*tensors: Tensor) -> tuple[()]:
        following = iter(tensors)
        slots, track = map_trees(lambda _: next(following), tree)
        lane.step.compute(Slots(*slots), Track(*track))
        return ()

    for wrapper in ({"cpp_wrapper": True, "size_asserts": False}, {}):
        try:
            lane.rewind(size)
            fast = _compile(step, leaves, wrapper)
            lane.rewind(size)
            fast(*leaves)
        except Exception as error:  # the step itself has been tried; tracing and compiling may fail in any way
            failed = type(error).__name__
        else:
            break
    else:
        raise Uncompiled(f"the step cannot be compiled ({failed})")
    if not observes(lane.shape.recipe):
        return lambda: fast(*leaves)

    def step_and_remember() -> None:
        fast(*leaves)
        lane.step.remember(lane.slots)

    return step_and_remember


def _compile(step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    with warnings.catch_warnings(action="ignore"):  # the compiler's own, which a user may have made errors
        return _compile_quietly(step, leaves, options)


def _compile_quietly(
    step: Callable[..., tuple[()]], leaves: Sequence[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import compile as inductor  # takes a second to import, so not for those who do not compile

    graph = make_fx(step)(*leaves)
    failed = ""
    try:
        use_own_products(graph.graph)
        graph.recompile()
    except Exception as error:  # building them may fail in any way
        failed = type(error).__name__
    for node in graph.graph.nodes:  # what tracing noted of its tensors is in the way of a wrapper in C++
        node.meta.clear()
    fast: Callable[..., Any] = inductor(graph, list(leaves), options)
    if failed:  # said now: without any compiler it would be the lesser half of the truth
        say(f"kernels for small products cannot be built ({failed}), so torch's are used")
    return fast


def _fields(record: Slots | Track) -> tuple[Any, ...]:
    return tuple(getattr(record, field.name) for field in fields(record))


def captured(lane: Lane, size: int) -> Callable[[], None]:
    """The kernels of a step as a CUDA graph; its memory belongs to the lane and is not given back in between."""
    lane.rewind(size)
    lane.step(lane.slots, lane.tracks[size])  # once more: by now all workspaces and choices of kernels are made
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            lane.step(lane.slots, lane.tracks[size])
    except RuntimeError as error:
        raise Unfit(f"its step cannot be captured ({str(error).splitlines()[0]:.100})") from error
    return graph.replay


# ── pools ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class Pool:
    """The places of one model, those used last at the end; and why its steps cannot be compiled, once that is known.

    `of` is what the model was when the first place was made; what was prepared for it serves no other.
    """

    of: object = None
    places: OrderedDict[tuple[object, ...], Place] = field(default_factory=OrderedDict)
    uncompiled: str = ""

    def known(self, shape: Shape) -> list[int]:
        """The sizes of crews that there is a place for."""
        return [place.lane.crew for place in self.places.values() if place.lane.shape == shape and place.lane.crew]

    def place(
        self, clients: Sequence[Arrival], shape: Shape, crew: int | None, number: int, make: Make, precision: str
    ) -> Place:
        """The place for clients of a shape (the first, second, ... for as many at once), made if there is none."""
        key = (shape, crew, number, make, precision)
        if key not in self.places:
            device = next(iter(clients[0].params.values())).device
            self._make_room(device)
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            lane = new_lane(shape, clients[0], crew, half=precision == "bf16", fused=make is not compiled)
            self.places[key] = Place(lane, make, "fp32" if lane.step.half else precision, stream)
        self.places.move_to_end(key)
        return self.places[key]

    def forget_unready(self) -> None:
        """Drop places whose steps could not be made: their modules may hold what is left of the trial."""
        for key in [key for key, place in self.places.items() if not place.steps]:
            del self.places[key]

    def _make_room(self, device: torch.device) -> None:
        def short() -> bool:
            if device.type != "cuda":
                return False
            free, total = torch.cuda.mem_get_info(device)
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return free + idle < LEAST_FREE * total

        while self.places and (len(self.places) >= MOST_PLACES or short()):
            self.places.popitem(last=False)


_POOLS: WeakKeyDictionary[nn.Module, Pool] = WeakKeyDictionary()


def pool_of(task: Task) -> Pool:
    """The pool that belongs to a task's global model, for as long as it lives and is not changed in Python."""
    module = task.model.module
    of = fingerprint(module), task.norm, task.scaler
    if module not in _POOLS or _POOLS[module].of != of:
        _POOLS[module] = Pool(of)
    return _POOLS[module]


def drive(places: Sequence[Place]) -> None:
    """All steps of all places, in turn, so that on a GPU their streams fill it together."""
    for step in range(max(len(place.plan) for place in places)):
        for place in places:
            place.advance(step)


def without_divergence(answers: Iterable[Answer]) -> Iterator[Update]:
    """The updates; the first client that has diverged ends it."""
    for _, answer in answers:
        if isinstance(answer, TrainingDiverged):
            raise answer
        yield answer


def say(reason: str) -> None:
    """Tell the log why something is not as fast as it could be, once."""
    if reason not in _SAID:
        _SAID.add(reason)
        log.warning("engine: %s", reason)
