"""The node's side: it introduces itself, trains its clients and answers. Made anew by Flower for every message.

Torch is imported only where tensors come in, so that an introduction is quick.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcover.errors import FedcoverError, InvalidValue
from fedcover.flower.messages import DATA_INFO, DATA_INFO_ARRAYS, DATA_INFO_STYPE
from fedcover.flower.nodes import read_node_config
from fedcover.log import log
from fedcover.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from fedcover.types import Model

TrainFn = Callable[["nn.Module", Mapping[str, Any], Context], Mapping[str, float]]
"""Trains a client's sub-model in place; gives at least `num-examples` and `loss`."""
EvaluateFn = Callable[["nn.Module", Mapping[str, Any], Context], Mapping[str, float]]
"""Evaluates a client's sub-model; gives at least `num-examples`, and any figures."""


def client_app(
    train_fn: TrainFn,
    model: "Callable[[], nn.Module | Model]",
    evaluate_fn: EvaluateFn | None = None,
) -> ClientApp:
    """A ClientApp whose nodes train the part of a model that `CoverageStrategy` sends them.

    `train_fn(module, config, context)` gets its part as an ordinary module and trains it in place; it gives a mapping
    with `num-examples` and `loss`. Its `config` holds the `train_config` of `CoverageStrategy.start`, the `capacity`
    of the part, and the round, as `round` from 0 on and, as Flower counts, as `server-round` from 1 on.
    `model` builds the whole model, as on the server. `evaluate_fn(module, config, context)` gets the node's part in
    evaluation mode, with norm statistics, and gives a mapping with `num-examples` and any figures, such as `accuracy`;
    it is called if the strategy has a `fraction_evaluate`.
    """

    def work(message: Message, context: Context) -> Message:
        with _room_for_torch():
            from fedcover.flower.client_training import train_module

        return train_module(message, context, train_fn, model)

    def evaluate(message: Message, context: Context) -> Message:
        with _room_for_torch():
            from fedcover.flower.client_evaluation import evaluate_module

        return evaluate_module(message, context, evaluate_fn, model)

    app = _app(work)
    app.evaluate()(evaluate)
    return app


def experiment_app() -> ClientApp:
    """The ClientApp that trains the clients of an experiment."""

    def work(message: Message, context: Context) -> Message:
        with _room_for_torch():
            from fedcover.flower.client_training import train_clients

        return train_clients(message, context)

    return _app(work)


@contextmanager
def _room_for_torch() -> Iterator[None]:
    """Call it by its name if a device cannot load torch for want of memory: the loader calls it an ImportError."""
    try:
        yield
    except (ImportError, OSError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(
            sign in str(error).lower() for sign in _NO_ROOM
        ):
            raise
        raise MemoryError(f"this device has too little memory to load torch: {error}") from error


_NO_ROOM = ("failed to map segment", "cannot allocate memory")
"""What the loader of libraries says where there is no memory left to put them."""


def _app(work: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.query()(_answer_query)
    app.train()(work)
    return app


def _tells_scale(config: Mapping[str, Any]) -> bool:
    wanted = config.get("tell-scale", True)
    if not isinstance(wanted, bool):
        raise InvalidValue(f"tell-scale in --node-config must be true or false; got {wanted!r}")
    return wanted


def _answer_query(message: Message, context: Context) -> Message:
    """What this node is, or what is wrong with its configuration; or it is told why the server does not take it."""
    if refused := message.content.config_records.get("refused"):
        from fedcover.errors import printable

        log.error(
            "fedcover: the server does not take this node: %s",
            printable(str(refused["why"]))[:1000],
        )
        return Message(RecordDict(), reply_to=message)
    content = RecordDict()
    try:
        said = read_node_config(context.node_id, context.node_config, __version__)
        hello: dict[str, Any] = {
            "place": said.partition_id,
            "places": said.num_partitions,
            "capacity": said.capacity or 0.0,
        }
        if rows := context.node_config.get("rows"):
            from fedcover.flower.node_data import describe_node_data

            told = describe_node_data(str(rows), scale=_tells_scale(context.node_config))
            content[DATA_INFO] = ArrayRecord(
                {name: _array(told.pop(name)) for name in DATA_INFO_ARRAYS}
            )
            hello |= told
    except FedcoverError as error:
        log.error("fedcover: this node cannot take part: %s", error)
        hello = {"error": str(error)}
    content["hello"] = ConfigRecord({"error": "", "version": __version__, **hello})
    return Message(content, reply_to=message)


def _array(column: bytes) -> Array:
    return Array("uint8", (len(column),), DATA_INFO_STYPE, column)
