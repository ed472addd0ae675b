"""One client's local training, followed step by step.

`TrajectoryProbe.train` trains a client exactly as the run did. At each step it records how far the
client has moved; at some steps also gradients and their differences from those at the global model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.tensors import clone, squared_norm, zeros_like
from fedcover.theory import LocalSteps
from fedcover.theory.certificate.global_loss import GlobalLoss
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
"""Called before every step with the client's model, its parameters, the gradient and the batch."""


@dataclass
class ClientTrajectory:
    """The measurements of one client's local training.

    Vectors are in the shapes of the client's part.
    """

    client: Client
    reduction: Reduction
    steps: LocalSteps
    pruned_energy: float
    squared_drift: float = 0.0
    """The mean squared distance from the start, weighted by c_j / S."""
    step_gradient: float = 0.0
    """The largest squared length of a gradient that was used for a step."""
    split_error: float = 0.0
    """The relative error of Lemma 1.

    The lemma splits the squared distance from the global model into drift and pruned energy.
    """
    gradient: float = 0.0
    """The largest mean squared length of the client's batch gradients."""
    variance: float = 0.0
    """The largest variance of the client's batch gradients."""
    secant: float = 0.0
    """The largest change of the client's gradient since the global model, per distance."""
    batch_secant: float = 0.0
    """The same for gradients of single batches."""
    probe_weights: list[float] = field(default_factory=list)
    """The weights c_j of the examined steps."""
    gradient_gap: Params = field(default_factory=dict)
    """The mean difference of the client's gradient from that at the global model."""
    noise: Params = field(default_factory=dict)
    """The mean difference of batch gradients from the client's gradient."""
    batch_gradient: Params = field(default_factory=dict)
    """The sum of the gradients of the client's batches at the global model, weighted by c_j."""


@dataclass(frozen=True)
class _Step:
    """One local step, as the probe sees it."""

    gradient: Params
    """The masked batch gradient with weight decay, along which the client steps."""
    squared_distance: float
    """From the start of the client's training."""
    weight: float
    """c_j: how much the gradient counts in the end."""


@dataclass(frozen=True)
class TrajectoryProbe:
    """Trains clients and measures their trajectories.

    `model` is the global model, with weights that no client ever trains at zero; `client_gradients`
    are the clients' gradients at this model. Each trajectory is examined at `num_probes` steps.
    With `every_batch`, the gradient of every batch is also computed at the global model. That is
    needed where the mean of these differs from the client's gradient.
    """

    global_loss: GlobalLoss
    model: Params
    client_gradients: dict[int, Params]
    num_probes: int
    every_batch: bool

    def train(
        self, task: Task, state: State, client: Client, reduction: Reduction, lr: float
    ) -> tuple[Update, ClientTrajectory]:
        """Train a client as the run did, and measure its trajectory."""
        rows = self.global_loss.rows(client.id)
        path = self._new_trajectory(task, client, reduction, len(rows))
        probed_steps = self._probed_steps(path.steps.count)
        global_gradient = reduction.extract(self.client_gradients[client.id])
        masks = reduction.gradient_mask()
        start: Params = {}

        def step_hook(forward: Forward, params: Params, gradient: Params, batch: Batch) -> None:
            if not start:
                start.update(clone(params))
            number = int(batch.step)
            step = _Step(
                _step_gradient(gradient, params, masks, task.local.weight_decay),
                squared_norm(params[name] - start[name] for name in params),
                float(path.steps.shares[number]),
            )
            path.squared_drift += step.weight / path.steps.total * step.squared_distance
            path.step_gradient = max(path.step_gradient, squared_norm(step.gradient.values()))
            if number in probed_steps or self.every_batch:
                self._record_batch(path, step, batch)
            if number in probed_steps:
                # Dropout draws random numbers, which must not change the client's training.
                with torch.random.fork_rng(devices=[]):
                    moments = _batch_moments(forward, params, rows, task, masks)
                self._record_client(path, step, params, moments, global_gradient)

        observed_task = replace(task, recipe=with_step_hook(task.recipe, step_hook))
        update = train_client(observed_task, state, client, reduction, lr)
        _sums_to_means(path)
        return update, path

    def _new_trajectory(
        self, task: Task, client: Client, reduction: Reduction, num_rows: int
    ) -> ClientTrajectory:
        num_steps = task.local.epochs * -(-num_rows // task.local.batch_size)
        masks = reduction.mask(self.model)
        pruned_energy = squared_norm(tensor[~masks[name]] for name, tensor in self.model.items())
        steps = LocalSteps(num_steps, task.local.momentum)
        return ClientTrajectory(client, reduction, steps, pruned_energy)

    def _probed_steps(self, num_steps: int) -> set[int]:
        """Return the numbers of the examined steps, evenly spaced from the first to the last."""
        num_probes = min(self.num_probes, num_steps)
        return {round(k * (num_steps - 1) / max(1, self.num_probes - 1)) for k in range(num_probes)}

    def _record_batch(self, path: ClientTrajectory, step: _Step, batch: Batch) -> None:
        """Compare a step's gradient with that of the same batch at the global model."""
        rows = Samples(batch.x, batch.y)
        _, full_gradient = self.global_loss.loss_and_gradient(self.model, rows, chunk=len(rows))
        global_gradient = path.reduction.extract(full_gradient)
        distance = step.squared_distance + path.pruned_energy
        if distance:
            difference = squared_norm(_difference(step.gradient, global_gradient).values())
            path.batch_secant = max(path.batch_secant, (difference / distance) ** 0.5)
        if self.every_batch:
            _add(path.batch_gradient, global_gradient, step.weight)

    def _record_client(
        self,
        path: ClientTrajectory,
        step: _Step,
        params: Params,
        moments: "GradientMoments",
        global_gradient: Params,
    ) -> None:
        """Record the client's gradient, the variance of its batches, and the error of Lemma 1."""
        path.gradient = max(path.gradient, moments.square)
        path.variance = max(path.variance, moments.square - squared_norm(moments.gradient.values()))
        gap = _difference(moments.gradient, global_gradient)
        distance = step.squared_distance + path.pruned_energy
        if distance:
            path.secant = max(path.secant, (squared_norm(gap.values()) / distance) ** 0.5)
            difference = {name: -tensor.double() for name, tensor in self.model.items()}
            doubles = {name: tensor.double() for name, tensor in params.items()}
            path.reduction.add_into(difference, doubles, 1.0)
            split_error = abs(squared_norm(difference.values()) - distance) / distance
            path.split_error = max(path.split_error, split_error)
        path.probe_weights.append(step.weight)
        _add(path.gradient_gap, gap, step.weight)
        _add(path.noise, _difference(step.gradient, moments.gradient), step.weight)


@dataclass(frozen=True)
class GradientMoments:
    """A client's gradient over all its rows, and the mean squared length of batch gradients."""

    gradient: Params
    square: float


def _batch_moments(
    forward: Forward, params: Params, rows: Samples, task: Task, masks: Mapping[str, Tensor]
) -> GradientMoments:
    """Compute the masked gradients, with weight decay, of the batches of the rows in order."""
    size = task.local.batch_size
    mean = zeros_like(params, torch.float64)
    square = 0.0
    for x, y in zip(torch.split(rows.x, size), torch.split(rows.y, size), strict=True):
        with torch.enable_grad():
            values = {name: p.detach().requires_grad_() for name, p in params.items()}
            loss = cross_entropy(forward, values, Batch(x, y, torch.tensor(0)), ())
            parts = torch.autograd.grad(
                loss, list(values.values()), allow_unused=True, materialize_grads=True
            )
        batch_gradient = dict(zip(values, parts, strict=True))
        gradient = _step_gradient(batch_gradient, params, masks, task.local.weight_decay)
        share = len(y) / len(rows)
        square += share * squared_norm(gradient.values())
        for name, tensor in gradient.items():
            mean[name].add_(tensor, alpha=share)
    return GradientMoments(mean, square)


def _step_gradient(
    gradient: Params, params: Params, masks: Mapping[str, Tensor], decay: float
) -> Params:
    """Mask a batch gradient and add weight decay."""
    return {
        name: (tensor * masks[name] if name in masks else tensor) + decay * params[name]
        for name, tensor in gradient.items()
    }


def _difference(left: Params, right: Params) -> Params:
    return {name: left[name] - right[name] for name in left}


def with_step_hook(recipe: Recipe, step_hook: StepHook) -> Recipe:
    """Return the recipe with a function that is called before every step."""
    last_call: dict[str, tuple[Forward, Params, Batch]] = {}

    def loss(forward: Forward, params: Params, batch: Batch, carry: Carry) -> Tensor:
        last_call["loss"] = (forward, params, batch)
        return recipe.loss(forward, params, batch, carry)

    def observe(carry: Carry, gradients: Params) -> Carry:
        forward, params, batch = last_call["loss"]
        step_hook(forward, {name: p.detach() for name, p in params.items()}, gradients, batch)
        return recipe.observe(carry, gradients)

    return replace(recipe, loss=loss, observe=observe)


def _add(target: Params, values: Params, scale: float) -> None:
    for name, tensor in values.items():
        if name not in target:
            target[name] = torch.zeros_like(tensor, dtype=torch.float64)
        target[name].add_(tensor, alpha=scale)


def _sums_to_means(path: ClientTrajectory) -> None:
    """Divide sums over the examined steps by the sum of their weights."""
    total = sum(path.probe_weights)
    for vector in (path.gradient_gap, path.noise):
        for tensor in vector.values():
            tensor /= total
