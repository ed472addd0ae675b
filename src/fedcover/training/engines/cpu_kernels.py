"""Products of small batches with large matrices, by kernels of our own where torch's are slower (`cpu_kernels.cpp`).

Two operations take the place of what stands in a traced step: `linear`, the product of a layer of a crew, and
`descend_`, the product that is a layer's gradient together with the momentum and the weights that it moves, in one
pass over them.
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
"""Of a client's batch, which is read again for every output: what stays in a core's fastest cache."""

MIN_INPUTS, MIN_OUTPUTS, CPU_CAPABILITIES = 512, 25, ("AVX2", "AVX512")
"""Of a layer, and what a processor can: from these on the kernels were measured to be faster than torch's."""

_aten = torch.ops.aten
_VIEW_OPS = (
    _aten.transpose.int,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
)
_SGD_UPDATE_OPS = (_aten.mul_.Tensor, _aten.add_.Tensor, _aten.mul.Tensor, _aten.sub_.Tensor)


class SGDUpdateNodes(NamedTuple):
    """A gradient's product, and the operations by which `steps.Step` goes down along it."""

    product: Node
    scaled: Node
    moved: Node
    change: Node
    last: Node


@cache
def build_kernels() -> None:
    """Compile the kernels for this machine; torch keeps them on disk, and lets one process at a time compile them."""
    from torch._inductor.codecache import CppCodeCache  # takes a second to import

    source = Path(__file__).with_name("cpu_kernels.cpp").read_text()
    CppCodeCache.load_async(source, extra_flags=("-ffp-contract=fast",))()
    torch.library.register_fake(
        "fedcover::linear", lambda x, weight: x.new_empty(*x.shape[:2], weight.shape[1])
    )
    torch.library.register_fake("fedcover::descend_", lambda *_: None)


def use_custom_kernels(graph: Graph) -> None:
    """Put the kernels into a traced step wherever they fit; if they cannot be built this raises and changes nothing."""
    if (
        torch.get_num_threads() > 1
        or torch.backends.cpu.get_cpu_capability() not in CPU_CAPABILITIES
    ):
        return  # torch's products use all threads
    layers = [
        node
        for node in graph.nodes
        if node.target is _aten.bmm.default and _is_layer(*_fake_tensors(node.args))
    ]
    written = _mutated_tensors(graph.nodes)
    descents = [
        found
        for node in graph.nodes
        if (found := _match_sgd_update(node)) and not written & _input_tensors(found)
    ]
    if layers or descents:
        build_kernels()
    for product, scaled, moved, change, last in descents:
        with graph.inserting_before(last):
            back = graph.call_function(_aten.transpose.int, (product.args[0], 1, 2))
            arguments = (
                last.args[0],
                scaled.args[0],
                back,
                product.args[1],
                change.args[1],
                scaled.args[1],
            )
            graph.call_function(torch.ops.fedcover.descend_.default, arguments)
        for node in (last, change, moved, scaled):
            graph.erase_node(node)
    for node in layers:
        with graph.inserting_before(node):
            weight = graph.call_function(_aten.transpose.int, (node.args[1], 1, 2))
            made = graph.call_function(torch.ops.fedcover.linear.default, (node.args[0], weight))
        node.replace_all_uses_with(made)
        graph.erase_node(node)


# ── where they fit ──────────────────────────────────────────────────────────────────────────────────────


def _is_layer(x_CBI: Tensor, weight_CIO: Tensor) -> bool:
    return _kernel_fits(x_CBI, weight_CIO.mT, weight_CIO.shape[2])


def _is_gradient(back_COB: Tensor, x_CBI: Tensor) -> bool:
    return _kernel_fits(x_CBI, back_COB.mT, back_COB.shape[1])


def _kernel_fits(x_CBI: Tensor, other: Tensor, outputs: int) -> bool:
    """Whether the kernels take these tensors and are faster."""
    _, rows, inputs = x_CBI.shape
    small = rows * inputs * x_CBI.itemsize <= MAX_BATCH_BYTES
    large = inputs >= MIN_INPUTS and outputs >= MIN_OUTPUTS
    kinds = x_CBI.device.type == "cpu" and x_CBI.dtype in (torch.float32, torch.float64)
    return small and large and kinds and x_CBI.is_contiguous() and other.is_contiguous()


def _match_sgd_update(last: Node) -> SGDUpdateNodes | None:
    """The descent that ends here, if it follows nothing but a large product."""
    change, moved, scaled = last.prev, last.prev.prev, last.prev.prev.prev
    steps = scaled, moved, change, last
    if tuple(node.target for node in steps) != _SGD_UPDATE_OPS or any(
        node.kwargs for node in steps
    ):
        return None
    momentum, rate = scaled.args[1], change.args[1]
    if (moved.args[0], change.args[0], last.args[1]) != (scaled, moved, change) or not isinstance(
        momentum, float
    ):
        return None
    if not isinstance(rate, Node) or _fake_tensors([rate])[0].ndim:
        return None
    product: Any = moved.args[1]
    while product.target in _VIEW_OPS and len(product.users) == 1:
        product = product.args[0]
    if (
        product.target is not _aten.bmm.default
        or len(product.users) > 1
        or not _is_gradient(*_fake_tensors(product.args))
    ):
        return None
    same = _fake_tensors((product, moved.args[1], scaled.args[0], last.args[0]))
    kinds = {(value.shape, value.stride(), value.dtype) for value in same}
    return SGDUpdateNodes(product, *steps) if len(kinds) == 1 else None


def _input_tensors(descent: SGDUpdateNodes) -> set[Node]:
    """What the kernel reads later than the product did: nothing may have written there."""
    return {_view_base(node) for node in descent.product.all_input_nodes}


def _mutated_tensors(nodes: Iterable[Node]) -> set[Node]:
    """All tensors that an operation which writes has to do with."""
    return {
        _view_base(each)
        for node in nodes
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        for each in node.all_input_nodes
    }


def _view_base(node: Any) -> Node:
    """The tensor that a node is a view of, or the node itself."""
    while node.target in (*_VIEW_OPS, operator.getitem) or (
        isinstance(node.target, OpOverload)
        and any(made.alias_info for made in node.target._schema.returns)
    ):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _fake_tensors(nodes: Iterable[Any]) -> list[Tensor]:
    """What tracing noted of tensors: how they lie, not their numbers."""
    return [node.meta["val"] for node in nodes]
