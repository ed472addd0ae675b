"""Put our own CPU kernels into a traced step where torch's matrix products are slow.

The kernels (`cpu_kernels.cpp`) multiply small batches with large matrices. `linear` is the product
of a stacked layer. `sgd_update_` is a weight's gradient, its momentum and its update in one pass
over the weight. Where the kernels are used depends on the constants below, which were measured;
results stay equal up to rounding.
"""

import operator
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

MAX_BATCH_BYTES = 1 << 15
"""The size of one client's batch, which is read again for every output: a core's L1 cache."""

MIN_INPUTS, MIN_OUTPUTS = 512, 25
"""The size of a layer from which the kernels are faster than torch's."""

CPU_CAPABILITIES = ("AVX2", "AVX512")
"""The processors on which they are."""

MIN_TORCH = "2.13"
"""The version of torch from which on the kernels are used.

With torch 2.11, compiled steps with them had wrong results: a weight of an MLP was off by 0.0018.
"""

_aten = torch.ops.aten
_VIEW_OPS = (
    _aten.transpose.int,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
)
_SGD_UPDATE_OPS = (_aten.mul_.Tensor, _aten.add_.Tensor, _aten.mul.Tensor, _aten.sub_.Tensor)
"""What `SGDStep._plain_update` does to one weight, without clipping and decay."""


class SGDUpdateNodes(NamedTuple):
    """The nodes of a graph that compute a weight's gradient and update the weight.

    Attributes:
        product: The gradient, a batched matrix product.
        decay: `velocity *= momentum`
        accumulate: `velocity += gradient`
        change: `velocity * rate`
        update: `weight -= change`
    """

    product: Node
    decay: Node
    accumulate: Node
    change: Node
    update: Node


@cache
def build_kernels() -> None:
    """Compile the kernels for this machine. torch caches them on disk, and locks the cache."""
    from torch._inductor.codecache import CppCodeCache  # takes a second to import

    source = Path(__file__).with_name("cpu_kernels.cpp").read_text()
    CppCodeCache.load_async(source, extra_flags=("-ffp-contract=fast",))()
    torch.library.register_fake(
        "fedcover::linear", lambda x, weight: x.new_empty(*x.shape[:2], weight.shape[1])
    )
    torch.library.register_fake("fedcover::sgd_update_", lambda *_: None)


def use_custom_kernels(graph: Graph) -> None:
    """Replace operations of a traced step by our kernels, wherever these are faster.

    If the kernels cannot be built, this raises and leaves the graph as it is.
    """
    if torch.__version__ < MIN_TORCH:
        return
    if torch.get_num_threads() > 1:
        return  # torch's products use all threads, the kernels only one
    if torch.backends.cpu.get_cpu_capability() not in CPU_CAPABILITIES:
        return
    layers = _find_layers(graph)
    updates = _find_sgd_updates(graph)
    if layers or updates:
        build_kernels()
    for nodes in updates:
        _replace_sgd_update(graph, nodes)
    for product in layers:
        _replace_layer(graph, product)


# ── replacing operations ────────────────────────────────────────────────────────────────────────


def _replace_sgd_update(graph: Graph, nodes: SGDUpdateNodes) -> None:
    y_grad_COB, x_CBI = nodes.product.args
    velocity, momentum = nodes.decay.args
    rate = nodes.change.args[1]
    weight = nodes.update.args[0]
    with graph.inserting_before(nodes.update):
        y_grad_CBO = graph.call_function(_aten.transpose.int, (y_grad_COB, 1, 2))
        arguments = (weight, velocity, y_grad_CBO, x_CBI, rate, momentum)
        graph.call_function(torch.ops.fedcover.sgd_update_.default, arguments)
    for node in (nodes.update, nodes.change, nodes.accumulate, nodes.decay):
        graph.erase_node(node)


def _replace_layer(graph: Graph, product: Node) -> None:
    x_CBI, weight_CIO = product.args
    with graph.inserting_before(product):
        weight_COI = graph.call_function(_aten.transpose.int, (weight_CIO, 1, 2))
        y_CBO = graph.call_function(torch.ops.fedcover.linear.default, (x_CBI, weight_COI))
    product.replace_all_uses_with(y_CBO)
    graph.erase_node(product)


# ── finding operations ──────────────────────────────────────────────────────────────────────────


def _find_layers(graph: Graph) -> list[Node]:
    """Return the products of large layers."""
    products = [node for node in graph.nodes if node.target is _aten.bmm.default]
    return [product for product in products if _is_layer(*_fake_tensors(product.args))]


def _find_sgd_updates(graph: Graph) -> list[SGDUpdateNodes]:
    """Return the updates of large weights whose inputs nothing overwrites."""
    mutated = _mutated_tensors(graph.nodes)
    updates = []
    for node in graph.nodes:
        nodes = _match_sgd_update(node)
        if nodes is not None and not mutated & _input_tensors(nodes):
            updates.append(nodes)
    return updates


def _match_sgd_update(update: Node) -> SGDUpdateNodes | None:
    """Return the operations that end in this one, if they are an SGD update of a large weight."""
    change, accumulate, decay = update.prev, update.prev.prev, update.prev.prev.prev
    operations = (decay, accumulate, change, update)
    if tuple(node.target for node in operations) != _SGD_UPDATE_OPS:
        return None
    if any(node.kwargs for node in operations):
        return None
    velocity, momentum = decay.args
    rate = change.args[1]
    if (accumulate.args[0], change.args[0], update.args[1]) != (decay, accumulate, change):
        return None
    if not isinstance(momentum, float):
        return None
    if not isinstance(rate, Node) or _fake_tensors([rate])[0].ndim:
        return None
    gradient = accumulate.args[1]
    product = _product_of(gradient)
    if product is None or not _is_gradient(*_fake_tensors(product.args)):
        return None
    tensors = _fake_tensors((product, gradient, velocity, update.args[0]))
    layouts = {(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}
    return SGDUpdateNodes(product, *operations) if len(layouts) == 1 else None


def _product_of(gradient: Any) -> Node | None:
    """Return the matrix product that a gradient is a view of, if nothing else uses it."""
    node = gradient
    while node.target in _VIEW_OPS and len(node.users) == 1:
        node = node.args[0]
    is_product = node.target is _aten.bmm.default and len(node.users) <= 1
    return node if is_product else None


def _is_layer(x_CBI: Tensor, weight_CIO: Tensor) -> bool:
    return _kernel_fits(x_CBI, weight_CIO.mT, weight_CIO.shape[2])


def _is_gradient(y_grad_COB: Tensor, x_CBI: Tensor) -> bool:
    return _kernel_fits(x_CBI, y_grad_COB.mT, y_grad_COB.shape[1])


def _kernel_fits(x_CBI: Tensor, other: Tensor, outputs: int) -> bool:
    """Return whether the kernels support these tensors and are faster."""
    _, rows, inputs = x_CBI.shape
    small_batch = rows * inputs * x_CBI.itemsize <= MAX_BATCH_BYTES
    large_weight = inputs >= MIN_INPUTS and outputs >= MIN_OUTPUTS
    supported = x_CBI.device.type == "cpu" and x_CBI.dtype in (torch.float32, torch.float64)
    contiguous = x_CBI.is_contiguous() and other.is_contiguous()
    return small_batch and large_weight and supported and contiguous


def _input_tensors(nodes: SGDUpdateNodes) -> set[Node]:
    """Return what the kernel reads later than the product did; it must not have changed."""
    return {_view_base(node) for node in nodes.product.all_input_nodes}


def _mutated_tensors(nodes: Iterable[Node]) -> set[Node]:
    """Return all tensors that are inputs of an operation which writes."""
    mutated = set()
    for node in nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            mutated |= {_view_base(input_node) for input_node in node.all_input_nodes}
    return mutated


def _view_base(node: Any) -> Node:
    """Return the tensor that a node is a view of, or the node itself."""
    while _is_view(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _is_view(node: Any) -> bool:
    if node.target in (*_VIEW_OPS, operator.getitem):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return any(output.alias_info for output in node.target._schema.returns)


def _fake_tensors(nodes: Iterable[Any]) -> list[Tensor]:
    """Return the tensors that tracing noted: shape, strides and dtype, without values."""
    return [node.meta["val"] for node in nodes]
