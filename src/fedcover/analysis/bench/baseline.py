"""What fedcover is compared with on one machine: the plain eager loop, and floors below which nothing can get.

Every function gives the seconds of each repetition, so that the caller can take a median and tell the spread. A "step"
trains all clients of a round by one mini-batch each.
"""

import time
from collections.abc import Callable

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
"""Models by name, each with the shape of an input and the number of classes."""

CLIENTS, BATCH, LR, MOMENTUM = 10, 10, 0.01, 0.5


def seconds(work: Callable[[], object], repeats: int, device: str, *, warm: int = 2) -> list[float]:
    """How long a piece of work takes, again and again, after some calls that do not count."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    found = []
    for repeat in range(warm + repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if repeat >= warm:
            found.append(time.perf_counter() - start)
    return found


# ── the plain eager loop ────────────────────────────────────────────────────────────────────────────────


def eager_step(
    name: str,
    device: str = "cpu",
    *,
    clients: int = CLIENTS,
    batch: int = BATCH,
    bf16: bool = False,
    repeats: int = 5,
) -> list[float]:
    """One mini-batch for each client, one client after another: autograd and `torch.optim.SGD`, as public codes do."""
    modules = [training_model(name, device) for _ in range(clients)]
    optimisers = [
        torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM) for module in modules
    ]
    x_CB, y_CB = random_batches(name, device, clients, batch)

    def step() -> None:
        for module, optimiser, x_B, y_B in zip(modules, optimisers, x_CB, y_CB, strict=True):
            sgd_step(module, optimiser, x_B, y_B, bf16)

    return seconds(step, repeats, device)


def eager_clients(*, clients: int = CLIENTS, steps: int, batch: int = BATCH) -> Callable[[], None]:
    """So many steps of each of the MLP's clients, one client after another, as public codes do it; on the CPU."""
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
    """A client's epochs from the given weights, its rows sliced by hand; gives the trained tensors."""
    module.load_state_dict(start)
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
    for order_N in orders:
        for rows_B in torch.split(order_N, batch):
            sgd_step(module, optimiser, x_N[rows_B], y_N[rows_B])
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def sgd_step(
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    x_B: Tensor,
    y_B: Tensor,
    bf16: bool = False,
) -> None:
    """One step of one client."""
    optimiser.zero_grad()
    with torch.autocast(x_B.device.type, torch.bfloat16, enabled=bf16):
        logits_BK = module(x_B)
    F.cross_entropy(logits_BK.float(), y_B).backward()  # type: ignore[no-untyped-call]
    optimiser.step()


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right answers."""
    batches = zip(torch.split(x, 256), torch.split(y, 256), strict=True)
    right = [(module(x_B).argmax(1) == y_B).sum() for x_B, y_B in batches]
    return float(torch.stack(right).sum()) / len(y)


# ── floors ──────────────────────────────────────────────────────────────────────────────────────────────


def matmul_floor(*, clients: int = CLIENTS, steps: int, batch: int = BATCH) -> Callable[[], None]:
    """Only the two large products of each of the same steps; on the CPU."""
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
    """One model with one batch of all clients' images, channels-last, in one CUDA graph (eager without CUDA)."""
    with allowing_tf32(precision in ("tf32", "bf16")):
        module = training_model(name, device)
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        velocity = [torch.zeros_like(p) for p in module.parameters()]
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

        return seconds(
            capture_graph(step) if device.startswith("cuda") else step, repeats, device, warm=5
        )


def capture_graph(step: Callable[[], None]) -> Callable[[], None]:
    """The same work as one CUDA graph."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries choose their kernels before the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class allowing_tf32:  # noqa: N801  # reads as a verb
    """Let float32 products run on TF32 units for a while, with the fastest convolutions."""

    def __init__(self, allowed: bool) -> None:
        self.wanted = allowed

    def __enter__(self) -> None:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        self.before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
        matmul.allow_tf32 = cudnn.allow_tf32 = self.wanted
        cudnn.benchmark = True

    def __exit__(self, *error: object) -> None:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = self.before


# ── what they share ─────────────────────────────────────────────────────────────────────────────────────


def training_model(name: str, device: str) -> nn.Module:
    """The model of a job in training mode; norms use the batch's own statistics, as fedcover's clients do."""
    model, shape, classes = BENCH_MODELS[name]
    build = registry.look_up("model", registry.parse("model", model), MODELS)
    return use_batch_statistics(build(shape, classes, "batch").module).to(device).train()


def random_batches(name: str, device: str, clients: int, number: int) -> tuple[Tensor, Tensor]:
    """Random images and labels for each client."""
    _, shape, classes = BENCH_MODELS[name]
    draw = torch.Generator().manual_seed(0)
    x_CB = torch.randn(clients, number, *shape, generator=draw)
    return x_CB.to(device), torch.randint(classes, (clients, number), generator=draw).to(device)
