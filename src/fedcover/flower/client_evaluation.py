"""Evaluation on the nodes of an app of one's own: each gets its part of the model, ready to use, and tells figures."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from fedcover.errors import FedcoverError, InvalidValue, printable
from fedcover.flower.client_training import whole_model
from fedcover.flower.messages import EVALUATE, Order, Orders, read_orders, to_node
from fedcover.flower.node_data import MOST_SAMPLES
from fedcover.flower.payloads import as_sent, bundle, headed, kept, read_reduction, received, sections, wanted_part
from fedcover.models.meta_device import hollow_or_whole
from fedcover.models.norms import calibrate, running
from fedcover.submodels.build import fill, submodel
from fedcover.submodels.unit_groups import to_json
from fedcover.types import Client, Model, Params, Reduction

log = logging.getLogger("fedcover")
FIGURES, FAILED, COUNT = "figures", "failed", "num-examples"
MOST_FIGURES = 100
"""How many figures one node may tell."""


def evaluation_order(
    node: int, round: int, client: Client, part: Reduction, model: Model, params: Params,
    calibration: Tensor | None, config: Mapping[str, Any], *, ttl: float,
) -> Message:  # fmt: skip
    """The message with a node's part of the model, whose norm statistics the server has computed for that part."""
    encoded, wire = as_sent(part, model)
    sent = {"params": kept(wire, wire.extract(params))}
    if calibration is not None:
        sent["statistics"] = running(calibrate(submodel(model.module, wire, params), calibration))
    order = Order(client.id, client.capacity, client.slot, encoded, 0, "")
    parcels = (bundle(headed(sent)),)
    unit_groups = to_json(model.groups)
    orders = Orders(round, 0.0, torch.get_num_threads(), "", (order,), parcels, dict(config), unit_groups)
    return to_node(node, orders, ttl=ttl, kind=EVALUATE)


def evaluate_module(
    message: Message,
    context: Context,
    evaluate_fn: Callable[[nn.Module, Mapping[str, Any], Context], Mapping[str, float]] | None,
    build: Callable[[], nn.Module | Model],
) -> Message:
    """Let a user's own function evaluate this node's part of the model."""
    try:
        if evaluate_fn is None:
            raise InvalidValue("this node's client_app has no evaluate_fn")
        orders = read_orders(message)
        (order,) = orders.orders
        module = _received(order, orders, hollow_or_whole(partial(whole_model, build, orders.groups), "model"))
        config = {**orders.own, "round": orders.round, "server-round": orders.round + 1, "capacity": order.capacity}
        with torch.no_grad():
            told = dict(evaluate_fn(module.eval(), config, context))
        if objection := _objection(told):
            raise InvalidValue(f"evaluate_fn must give {objection}; got {told}")
        return Message(RecordDict({FIGURES: MetricRecord({**told})}), reply_to=message)
    except Exception as error:  # of a function that somebody has brought along
        if not isinstance(error, FedcoverError):
            log.exception("evaluation has failed")
        why = f"{error}" if isinstance(error, FedcoverError) else f"{error!r}"
        return Message(RecordDict({FAILED: ConfigRecord({"why": why[:300]})}), reply_to=message)


def _received(order: Order, orders: Orders, model: Model) -> nn.Module:
    params = {name: p.detach() for name, p in model.module.named_parameters()}
    reduction = read_reduction(order.encoded, model)
    known = running(model.module)
    wanted = {"params": wanted_part(reduction, params)}
    if known:
        wanted["statistics"] = wanted_part(reduction, known)
    found = sections(orders.parcels[order.parcel], wanted)
    module = submodel(model.module, reduction, received(reduction, found["params"], params, "cpu"))
    return fill(module, found["statistics"]) if known else module


def figures_of(replies: Iterable[Message], tell: Callable[[str], None]) -> MetricRecord | None:
    """Every figure averaged over the nodes that tell it, by their numbers of examples; None if nobody answered.

    `tell` hears why an answer does not count.
    """
    told: list[dict[str, float]] = []
    for reply in replies:
        found = _read(reply)
        if isinstance(found, str):
            tell(found)
        else:
            told.append(found)
    return MetricRecord({**mean_figures(told)}) if told else None


def mean_figures(told: Sequence[Mapping[str, float]]) -> dict[str, int | float]:
    """Figures of several nodes in one, each weighed by its number of examples, whose sum it also has.

    >>> mean_figures([{"num-examples": 1, "accuracy": 1.0}, {"num-examples": 3, "accuracy": 0.0}])
    {'num-examples': 4, 'nodes': 2, 'accuracy': 0.25}
    """
    mean: dict[str, int | float] = {COUNT: int(sum(each[COUNT] for each in told)), "nodes": len(told)}
    names = {name: None for each in told for name in each if name not in mean}
    for name in names:
        having = [each for each in told if name in each]
        mean[name] = math.fsum(each[COUNT] * each[name] for each in having) / sum(each[COUNT] for each in having)
    return mean


def _read(reply: Message) -> dict[str, float] | str:
    if reply.has_error():
        return f"error {reply.error.code}: {str(reply.error.reason)[:300]!a}"
    if (failed := reply.content.config_records.get(FAILED)) is not None:
        return f"its node says: '{printable(str(failed.get('why')))[:300]}'"
    if FIGURES not in reply.content.metric_records:
        return "the reply lacks what a reply must have"
    told: dict[str, Any] = dict(reply.content.metric_records[FIGURES])
    objection = _objection(told)
    return f"its figures must be {objection}" if objection else told


def _objection(told: Mapping[str, Any]) -> str:
    """What is wrong with figures; nothing if they are such."""
    count = told.get(COUNT)
    if type(count) is not int or not 1 <= count <= MOST_SAMPLES:
        return f"{COUNT} (a count in 1..{MOST_SAMPLES}) and numbers"
    numbers = all(type(value) in (int, float) and abs(value) < 1e300 for value in told.values())
    return "" if numbers and len(told) <= MOST_FIGURES else f"at most {MOST_FIGURES} finite numbers, by name"
