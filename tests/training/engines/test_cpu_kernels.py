"""Our CPU kernels equal torch's products, alone and in a traced step."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.training.engines import cpu_kernels
from fedcover.training.engines.batched import batched
from tests.helpers.engines import RECIPES, TORCH_WARNS, agree
from tests.helpers.worlds import world

pytestmark = pytest.mark.skipif(
    torch.__version__ < cpu_kernels.MIN_TORCH, reason="the kernels are not used with this torch"
)

CLOSE = {torch.float32: 1e-4, torch.float64: 1e-12}
SIZES = {"clients": st.integers(1, 3), "rows": st.integers(1, 17), "outputs": st.integers(1, 33)}
INPUTS = st.one_of(
    st.integers(1, 40), st.sampled_from([111, 112, 113, 224, 300])
)  # around whole vectors and stripes


def drawn(seed, dtype, *shapes, strange=()):
    """Random tensors, each with some strange numbers in random places."""
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, dtype=dtype, generator=draw) for shape in shapes]
    for tensor, number in product(tensors, strange):
        tensor.view(-1)[torch.randint(tensor.numel(), (1,), generator=draw)] = number
    return tensors


def same(own, torchs, dtype):
    torch.testing.assert_close(own, torchs, rtol=CLOSE[dtype], atol=CLOSE[dtype], equal_nan=True)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 99), dtype=st.sampled_from(list(CLOSE)), inputs=INPUTS, **SIZES,
    strange=st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=2),
)  # fmt: skip
def test_own_products_equal_those_of_torch(seed, dtype, strange, clients, rows, outputs, inputs):
    cpu_kernels.build_kernels()
    big, wide, high = (clients, outputs, inputs), (clients, rows, inputs), (clients, rows, outputs)
    weight, velocity, x, back = drawn(seed, dtype, big, big, wide, high, strange=strange)
    same(torch.ops.fedcover.linear(x, weight), torch.bmm(x, weight.mT), dtype)
    rate, momentum = torch.tensor(0.1, dtype=dtype), 0.5
    moved = velocity * momentum + torch.bmm(back.mT, x)
    lower = weight - moved * rate
    torch.ops.fedcover.sgd_update_(weight, velocity, back, x, rate, momentum)
    same(velocity, moved, dtype)
    same(weight, lower, dtype)


def test_own_products_take_any_strides():
    cpu_kernels.build_kernels()
    x, weight = drawn(0, torch.float64, (2, 40, 3), (2, 40, 6))
    same(torch.ops.fedcover.linear(x.mT, weight.mT), torch.bmm(x.mT, weight), torch.float64)


@pytest.fixture(name="any_size")
def _any_size(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "MIN_INPUTS", 1)
    monkeypatch.setattr(cpu_kernels, "MIN_OUTPUTS", 1)
    monkeypatch.setattr(cpu_kernels, "CPU_CAPABILITIES", (torch.backends.cpu.get_cpu_capability(),))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="used")
def _used(any_size, monkeypatch):
    """How often our products are in each step; the compiler gives back what it is given, which is
    enough here.
    """
    used = []

    def given_back(graph, leaves, options):
        names = [str(node.target) for node in graph.graph.nodes]
        used.append(
            tuple(names.count(f"fedcover.{name}.default") for name in ("linear", "sgd_update_"))
        )
        return graph

    monkeypatch.setattr("torch._inductor.compile", given_back)
    return used


WORLDS = {
    "slices": ("mlp", {"policy": "prefix", "assignment": "slot"}, 3),
    "masks": ("mlp", {"policy": "magnitude", "fleet": "1x0.5"}, 1),
    "whole": ("mlp", {"policy": "full", "momentum": 0.9}, 3),
    "clipped": ("mlp", {"policy": "full", "clip": 0.05}, 0),
    "decayed": ("mlp", {"policy": "full", "weight_decay": 0.1}, 0),
    "watched": ("mlp", RECIPES["prunefl"], 0),
    "in ranks": ("lora", {"policy": "full"}, 4),
    "after convolutions": ("cnn", {"policy": "full"}, 2),
}
"""Models, fields, and the layers whose gradient is followed by nothing but the descent."""


@pytest.mark.parametrize(("model", "fields", "descents"), WORLDS.values(), ids=WORLDS.keys())
def test_step_with_own_products_equals_sequential(model, fields, descents, used, caplog):
    agree(*world(model, **fields), batched)
    assert {number for _, number in used} == {descents}
    assert all(layers for layers, _ in used)
    assert not [record for record in caplog.records if record.name == "fedcover"]


@TORCH_WARNS
def test_compiled_step_with_own_products_equals_sequential(any_size, caplog):
    agree(*world("mlp", policy="full", fleet="1x1", clients=6, active=2, epochs=1), batched)
    assert not [record for record in caplog.records if record.name == "fedcover"]


@pytest.mark.parametrize(
    "between", [lambda back, x: None, lambda back, x: back.add_(1), lambda back, x: x[0].zero_()]
)
def test_product_with_changed_factors_is_not_fused(between, used):
    """Two layers that multiply each other have each other's weights in their gradients."""

    def step(weight, velocity, back, x, rate):
        gradient = torch.bmm(back.mT, x)
        between(back, x)
        velocity.mul_(0.5).add_(gradient)
        weight.sub_(velocity * rate)

    tensors = drawn(0, torch.float64, (2, 5, 7), (2, 5, 7), (2, 3, 5), (2, 3, 7), ())
    plain, own = ([tensor.clone() for tensor in tensors] for _ in range(2))
    traced = make_fx(step)(*tensors)
    cpu_kernels.use_custom_kernels(traced.graph)
    traced.recompile()
    step(*plain)
    traced(*own)
    for left, right in zip(own, plain, strict=True):
        same(left, right, torch.float64)
    assert ("sgd_update_" in traced.code) == (between(*tensors[2:4]) is None)


def test_steps_with_threads_keep_torchs_products(used):
    torch.set_num_threads(2)  # the fixture sets it back
    agree(*world("mlp", policy="full"), batched)
    assert set(used) == {(0, 0)}


def test_steps_that_are_small_keep_torchs_products(used, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "MIN_INPUTS", 512)
    agree(*world("mlp", policy="full"), batched)
    assert set(used) == {(0, 0)}


def test_missing_kernels_leave_the_step_unchanged_with_a_warning(used, monkeypatch, caplog):
    def fail():
        raise OSError("no room")

    monkeypatch.setattr(cpu_kernels, "build_kernels", fail)
    agree(*world("mlp", policy="full"), batched)
    assert set(used) == {(0, 0)}
    assert [r.message for r in caplog.records] == [
        "engine: kernels for small products cannot be built (OSError), so torch's are used"
    ]
