"""What the engines are compared with: a plain eager loop, and limits that nothing can beat.

A "step" trains all clients of a round on one mini-batch each.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover import registry
from fedcover.models import MODELS
from fedcover.models.norms import use_batch_statistics

BENCH_MODELS = {
    "mlp": ("mlp(hidden=[200])", (1, 28, 28), 10),
    "wrn28-2": ("wide_resnet(depth=28, widen=2)", (3, 32, 32), 10),
    "wrn28-8": ("wide_resnet(depth=28, widen=8)", (3, 32, 32), 100),
}
"""The models by name, each with the shape of an input and the number of classes."""

CLIENTS, BATCH, LR, MOMENTUM = 10, 10, 0.01, 0.5


def synchronizer(device: str) -> Callable[[], None]:
    """Return a function that waits until the device has finished its work."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def seconds(work: Callable[[], object], repeats: int, device: str, *, warm: int = 2) -> list[float]:
    """Return the seconds of each repetition, after some that are not counted."""
    wait = synchronizer(device)
    durations = []
    for _ in range(warm + repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        durations.append(time.perf_counter() - start)
    return durations[warm:]


# ── the plain eager loop ────────────────────────────────────────────────────────────────────────


def eager_step(
    name: str,
    device: str = "cpu",
    *,
    clients: int = CLIENTS,
    batch: int = BATCH,
    bf16: bool = False,
    repeats: int = 5,
) -> list[float]:
    """Time one mini-batch per client, one client after another, as public codes train."""
    modules = [training_model(name, device) for _ in range(clients)]
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM) for module in modules
    ]
    x_CB, y_CB = random_batches(name, device, clients, batch)

    def step() -> None:
        for module, optimizer, x_B, y_B in zip(modules, optimizers, x_CB, y_CB, strict=True):
            sgd_step(module, optimizer, x_B, y_B, bf16)

    return seconds(step, repeats, device)


def eager_clients(*, clients: int = CLIENTS, steps: int, batch: int = BATCH) -> Callable[[], None]:
    """Return a function that trains the MLP's clients one after another on the CPU."""
    x_CN, y_CN = random_batches("mlp", "cpu", clients, steps * batch)
    module = training_model("mlp", "cpu")
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def train() -> None:
        for x_N, y_N in zip(x_CN, y_CN, strict=True):
            train_eager_client(module, start, x_N, y_N, [torch.randperm(steps * batch)], batch)

    return train


def train_eager_client(
    module: nn.Module,
    start: dict[str, Tensor],
    x_N: Tensor,
    y_N: Tensor,
    orders: list[Tensor],
    batch: int,
) -> dict[str, Tensor]:
    """Train one client from given weights for one epoch per order, and return its tensors."""
    module.load_state_dict(start)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    for order_N in orders:
        for rows_B in torch.split(order_N, batch):
            sgd_step(module, optimizer, x_N[rows_B], y_N[rows_B])
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def sgd_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    x_B: Tensor,
    y_B: Tensor,
    bf16: bool = False,
) -> None:
    """Make one step of one client."""
    optimizer.zero_grad()
    with torch.autocast(x_B.device.type, torch.bfloat16, enabled=bf16):
        logits_BK = module(x_B)
    F.cross_entropy(logits_BK.float(), y_B).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of correct predictions."""
    num_correct = 0
    for x_B, y_B in zip(torch.split(x, 256), torch.split(y, 256), strict=True):
        num_correct += int((module(x_B).argmax(1) == y_B).sum())
    return num_correct / len(y)


# ── lower limits ────────────────────────────────────────────────────────────────────────────────


def matmul_floor(*, clients: int = CLIENTS, steps: int, batch: int = BATCH) -> Callable[[], None]:
    """Return a function that computes only the two large products of each step, on the CPU."""
    weight_C = torch.randn(clients, 200, 784)
    x_CB, back_CB = torch.randn(clients, batch, 784), torch.randn(clients, batch, 200)
    hidden_B, gradient = torch.empty(batch, 200), torch.empty(200, 784)

    def multiply() -> None:
        for weight, x_B, back_B in zip(weight_C, x_CB, back_CB, strict=True):
            for _ in range(steps):
                torch.mm(x_B, weight.T, out=hidden_B)
                torch.mm(back_B.T, x_B, out=gradient)

    return multiply


def one_big_batch_step(
    name: str,
    device: str = "cuda",
    *,
    images: int = CLIENTS * BATCH,
    precision: str = "tf32",
    repeats: int = 30,
) -> list[float]:
    """Time one model with all clients' images in one batch, channels-last and in a CUDA graph.

    Without CUDA the step is eager.
    """
    with tf32_allowed(precision in ("tf32", "bf16")):
        module = training_model(name, device)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        velocity = [torch.zeros_like(param) for param in module.parameters()]
        x_CB, y_CB = random_batches(name, device, 1, images)
        x_B, y_B = x_CB[0].contiguous(memory_format=torch.channels_last), y_CB[0]

        def step() -> None:
            params: list[Tensor] = list(module.parameters())
            with torch.autocast(
                x_B.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
            ):
                logits_BK = module(x_B)
            gradients = torch.autograd.grad(F.cross_entropy(logits_BK.float(), y_B), params)
            with torch.no_grad():
                torch._foreach_mul_(velocity, MOMENTUM)
                torch._foreach_add_(velocity, list(gradients))
                torch._foreach_add_(params, velocity, alpha=-LR)

        fastest_step = capture_graph(step) if device.startswith("cuda") else step
        return seconds(fastest_step, repeats, device, warm=5)


def capture_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as one CUDA graph, and return its replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries must choose their kernels before the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 products for a while, and search for the fastest convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    cudnn.benchmark = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# ── models and data ─────────────────────────────────────────────────────────────────────────────


def training_model(name: str, device: str) -> nn.Module:
    """Return a model in training mode whose norms use the statistics of the batch.

    fedcover's clients train in the same way.
    """
    model, shape, classes = BENCH_MODELS[name]
    build = registry.look_up("model", registry.parse("model", model), MODELS)
    return use_batch_statistics(build(shape, classes, "batch").module).to(device).train()


def random_batches(name: str, device: str, clients: int, number: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels for each client."""
    _, shape, classes = BENCH_MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x_CB = torch.randn(clients, number, *shape, generator=generator)
    y_CB = torch.randint(classes, (clients, number), generator=generator)
    return x_CB.to(device), y_CB.to(device)
