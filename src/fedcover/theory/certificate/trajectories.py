"""One client's local training, watched step by step: how far it walks, along which gradients, over which landscape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.theory import LocalSteps
from fedcover.theory.certificate.global_loss import GlobalLoss, squared_norm
from fedcover.training.local_sgd import train_client
from fedcover.training.recipes.fedprox import cross_entropy
from fedcover.types import (
    Batch,
    Carry,
    Client,
    Forward,
    Params,
    Recipe,
    Reduction,
    Samples,
    State,
    Task,
    Update,
)

StepHook = Callable[[Forward, Params, Params, Batch], None]
"""What is done at every step: the client's model, its parameters, the gradient it will step along, the batch."""


@dataclass
class ClientTrajectory:
    """What was seen on one client's path; vectors are in the client's own shapes."""

    client: Client
    reduction: Reduction
    steps: LocalSteps
    pruned_energy: float
    squared_drift: float = 0.0
    """The mean squared distance from where it began, each step weighted as its gradient counts in the end."""
    step_gradient: float = 0.0
    split_error: float = 0.0
    """Lemma 1: by how much the squared distance from the global model differs from walked + lacking, relatively."""
    gradient: float = 0.0
    variance: float = 0.0
    secant: float = 0.0
    batch_secant: float = 0.0
    probe_weights: list[float] = field(default_factory=list)
    """How much the gradients of the steps that were looked at count in the end."""
    gradient_gap: Params = field(default_factory=dict)
    noise: Params = field(default_factory=dict)
    batch_gradient: Params = field(default_factory=dict)
    """The gradients of the very batches at the global model, as much as each counts in the end."""


@dataclass(frozen=True)
class TrajectoryProbe:
    """How closely paths are watched: at how many steps, and from which global model (never-trained weights at zero)."""

    global_loss: GlobalLoss
    model: Params
    client_gradients: dict[int, Params]
    num_probes: int
    every_batch: bool
    """Whether the very batches must be seen at the global model: their mean differs from the client's own gradient."""

    def train(
        self, task: Task, state: State, client: Client, reduction: Reduction, lr: float
    ) -> tuple[Update, ClientTrajectory]:
        """Train a client as the run did, and watch it."""
        rows = self.global_loss.rows(client.id)
        count = task.local.epochs * -(-len(rows) // task.local.batch_size)
        held = reduction.mask(self.model)
        pruned_energy = squared_norm(self.model, {name: ~bits for name, bits in held.items()})
        path = ClientTrajectory(
            client, reduction, LocalSteps(count, task.local.momentum), pruned_energy
        )
        start: Params = {}
        local_gradient = reduction.extract(self.client_gradients[client.id])
        places = {
            round(k * (count - 1) / max(1, self.num_probes - 1))
            for k in range(min(self.num_probes, count))
        }
        masks = reduction.gradient_mask()

        def step_hook(forward: Forward, params: Params, gradient: Params, batch: Batch) -> None:
            if not start:
                start.update({name: p.clone() for name, p in params.items()})
            taken = {n: (g * masks[n] if n in masks else g) + task.local.weight_decay * params[n]
                     for n, g in gradient.items()}  # fmt: skip
            moved = squared_norm({name: params[name] - start[name] for name in params})
            step = int(batch.step)
            share = float(path.steps.shares[step])
            path.squared_drift += share / path.steps.total * moved
            path.step_gradient = max(path.step_gradient, squared_norm(taken))
            near = step in places
            if near or self.every_batch:
                self._record_batch(path, taken, batch, moved, share)
            if near:
                with torch.random.fork_rng(
                    devices=[]
                ):  # a model with dropout draws; the path must not notice
                    means = _batch_moments(forward, params, rows, task, masks)
                self._record_client(path, means, taken, params, local_gradient, moved, share)

        update = train_client(
            replace(task, recipe=with_step_hook(task.recipe, step_hook)),
            state,
            client,
            reduction,
            lr,
        )
        _sums_to_means(path)
        return update, path

    def _record_batch(
        self, path: ClientTrajectory, taken: Params, batch: Batch, moved: float, share: float
    ) -> None:
        """The same batch at the global model."""
        rows = Samples(batch.x, batch.y)
        there = path.reduction.extract(
            self.global_loss.loss_and_gradient(self.model, rows, chunk=len(rows))[1]
        )
        distance = moved + path.pruned_energy
        if distance:
            apart = squared_norm({name: taken[name] - there[name] for name in taken})
            path.batch_secant = max(path.batch_secant, (apart / distance) ** 0.5)
        if self.every_batch:
            _add(path.batch_gradient, there, share)

    def _record_client(
        self,
        path: ClientTrajectory,
        means: "GradientMoments",
        taken: Params,
        params: Params,
        there: Params,
        moved: float,
        share: float,
    ) -> None:
        """The client's own gradient here, its batches' spread, and the curvature on the way from the global model."""
        path.gradient = max(path.gradient, means.square)
        path.variance = max(path.variance, means.square - squared_norm(means.gradient))
        distance = moved + path.pruned_energy
        apart = {name: means.gradient[name] - there[name] for name in taken}
        if distance:
            path.secant = max(path.secant, (squared_norm(apart) / distance) ** 0.5)
            whole = {name: -tensor.double() for name, tensor in self.model.items()}
            path.reduction.add_into(whole, {n: p.double() for n, p in params.items()}, 1.0)
            path.split_error = max(path.split_error, abs(squared_norm(whole) - distance) / distance)
        path.probe_weights.append(share)
        _add(path.gradient_gap, apart, share)
        _add(path.noise, {name: taken[name] - means.gradient[name] for name in taken}, share)


@dataclass(frozen=True)
class GradientMoments:
    """A client's gradient over all its rows, and the mean squared length of its batches' gradients."""

    gradient: Params
    square: float


def _batch_moments(
    forward: Forward, params: Params, rows: Samples, task: Task, masks: Mapping[str, Tensor]
) -> GradientMoments:
    """The masked gradients of all batches that the rows make in their own order, decay included."""
    size = task.local.batch_size
    mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    square = 0.0
    for x, y in zip(torch.split(rows.x, size), torch.split(rows.y, size), strict=True):
        with torch.enable_grad():
            values = {name: p.detach().requires_grad_() for name, p in params.items()}
            loss = cross_entropy(forward, values, Batch(x, y, torch.tensor(0)), ())
            parts = torch.autograd.grad(
                loss, list(values.values()), allow_unused=True, materialize_grads=True
            )
        gradient = {
            name: (g * masks[name] if name in masks else g) + task.local.weight_decay * params[name]
            for (name, g) in zip(values, parts, strict=True)
        }
        share = len(y) / len(rows)
        square += share * squared_norm(gradient)
        for name, g in gradient.items():
            mean[name].add_(g, alpha=share)
    return GradientMoments(mean, square)


def with_step_hook(recipe: Recipe, step_hook: StepHook) -> Recipe:
    """The same recipe with somebody who looks at every step, before it is taken."""
    last: dict[str, tuple[Forward, Params, Batch]] = {}

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        last["step"] = (forward, params, batch)
        return recipe.loss(forward, params, batch, carry)

    def observe(carry: Carry, gradients: Params) -> Carry:
        forward, params, batch = last["step"]
        step_hook(forward, {name: p.detach() for name, p in params.items()}, gradients, batch)
        return recipe.observe(carry, gradients)

    return replace(recipe, loss=loss, observe=observe)


def _add(target: Params, values: Params, scale: float) -> None:
    for name, tensor in values.items():
        if name not in target:
            target[name] = torch.zeros_like(tensor, dtype=torch.float64)
        target[name].add_(tensor, alpha=scale)


def _sums_to_means(path: ClientTrajectory) -> None:
    """Sums become means over the steps that were looked at."""
    total = sum(path.probe_weights)
    for vector in (path.gradient_gap, path.noise):
        for tensor in vector.values():
            tensor /= total
