"""The ClientApps of nodes: they report who they are, train or evaluate, and reply.

A SuperNode has a new process started for every message. Torch is imported only for tensors, so
that the answer to a query is quick.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcover.errors import FedcoverError, InvalidValue, printable
from fedcover.flower.messages import CLIENT_INFO, CLIENT_INFO_ARRAYS, CLIENT_INFO_STYPE
from fedcover.flower.nodes import MESSAGE_FORMAT, read_node_config
from fedcover.log import log
from fedcover.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from fedcover.types import Model

TrainFn = Callable[["nn.Module", Mapping[str, Any], Context], Mapping[str, float]]
"""Trains a client's sub-model in place; returns at least `num-examples` and `loss`."""
EvaluateFn = Callable[["nn.Module", Mapping[str, Any], Context], Mapping[str, float]]
"""Evaluates a client's sub-model; returns at least `num-examples`, and any metrics."""

_OUT_OF_MEMORY = ("failed to map segment", "cannot allocate memory")
"""How the loader of libraries reports a lack of memory."""


def client_app(
    train_fn: TrainFn,
    model: "Callable[[], nn.Module | Model]",
    evaluate_fn: EvaluateFn | None = None,
) -> ClientApp:
    """Build a ClientApp whose nodes train the part of a model that `CoverageStrategy` sends them.

    The config of both functions holds `capacity`, `round` (from 0) and `server-round` (from 1),
    besides the `train_config` or `evaluate_config` of `CoverageStrategy.start`.

    Args:
        train_fn: Called as `train_fn(module, config, context)`. Trains its part, an ordinary
            module, in place; returns a mapping with `num-examples` and `loss`.
        model: Builds the whole model, as on the server.
        evaluate_fn: Called in the same way, with norm statistics and in evaluation mode, if the
            strategy has a `fraction_evaluate`. Returns `num-examples` and any metrics, such as
            `accuracy`.

    Returns:
        The app for a Flower project's `clientapp`.

    Raises:
        MemoryError: When a message arrives, if the device cannot load torch.
    """

    def train(message: Message, context: Context) -> Message:
        with _explain_lack_of_memory():
            from fedcover.flower.client_training import train_module

        return train_module(message, context, train_fn, model)

    def evaluate(message: Message, context: Context) -> Message:
        with _explain_lack_of_memory():
            from fedcover.flower.client_evaluation import evaluate_module

        return evaluate_module(message, context, evaluate_fn, model)

    app = _build_app(train)
    app.evaluate()(evaluate)
    return app


def experiment_app() -> ClientApp:
    """Build the ClientApp that trains the clients of an experiment.

    Returns:
        The app for a Flower project's `clientapp`.

    Raises:
        MemoryError: When a message arrives, if the device cannot load torch.
    """

    def train(message: Message, context: Context) -> Message:
        with _explain_lack_of_memory():
            from fedcover.flower.client_training import train_clients

        return train_clients(message, context)

    return _build_app(train)


def _build_app(train: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.query()(_answer_query)
    app.train()(train)
    return app


@contextmanager
def _explain_lack_of_memory() -> Iterator[None]:
    """Raise a MemoryError if torch cannot be loaded for lack of memory.

    The loader of libraries reports that as an ImportError or an OSError.
    """
    try:
        yield
    except (ImportError, OSError, MemoryError) as error:
        text = str(error).lower()
        is_memory_error = isinstance(error, MemoryError)
        if not is_memory_error and not any(phrase in text for phrase in _OUT_OF_MEMORY):
            raise
        raise MemoryError(f"this device has too little memory to load torch: {error}") from error


def _answer_query(message: Message, context: Context) -> Message:
    """Report who this node is, or what is wrong with its configuration.

    If the server has rejected the node, log the reason instead.
    """
    if rejection := message.content.config_records.get("refused"):
        why = printable(str(rejection["why"]))[:1000]
        log.error("fedcover: the server does not accept this node: %s", why)
        return Message(RecordDict(), reply_to=message)
    content = RecordDict()
    hello: dict[str, Any] = {"error": "", "version": __version__, "format": MESSAGE_FORMAT}
    try:
        info = read_node_config(context.node_id, context.node_config, __version__)
        hello["place"], hello["places"] = info.partition_id, info.num_partitions
        hello["capacity"] = info.capacity or 0.0
        if rows := context.node_config.get("rows"):
            from fedcover.flower.node_data import describe_client_info

            report_scale = _reports_scale(context.node_config)
            description = describe_client_info(str(rows), scale=report_scale)
            arrays = {name: _to_array(description.pop(name)) for name in CLIENT_INFO_ARRAYS}
            content[CLIENT_INFO] = ArrayRecord(arrays)
            hello |= description
    except FedcoverError as error:
        log.error("fedcover: this node cannot take part: %s", error)
        hello = {"error": str(error), "version": __version__}
    content["hello"] = ConfigRecord(hello)
    return Message(content, reply_to=message)


def _reports_scale(config: Mapping[str, Any]) -> bool:
    """Return whether the node's configuration allows it to report the scale of its inputs."""
    tell_scale = config.get("tell-scale", True)
    if not isinstance(tell_scale, bool):
        raise InvalidValue(f"tell-scale in --node-config must be true or false; got {tell_scale!r}")
    return tell_scale


def _to_array(content: bytes) -> Array:
    return Array("uint8", (len(content),), CLIENT_INFO_STYPE, content)
