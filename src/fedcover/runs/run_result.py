"""The result of a run: its metrics and its trained model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fedcover.errors import InvalidValue, RunError
from fedcover.policies.base import fits
from fedcover.runs import plotting
from fedcover.runs.experiment import Experiment
from fedcover.runs.metrics_log import Metrics, summarise
from fedcover.server.averaging import with_averaged_params
from fedcover.server.cohort import cohort_of, reduction_for_capacity, view_of
from fedcover.server.evaluation import FULL_REDUCTION, eval_model
from fedcover.server.round_setup import Setup
from fedcover.types import Reduction, State


@dataclass(frozen=True, repr=False)
class Run:
    """A finished or stopped run: its experiment, its metrics and its trained model.

    Attributes:
        experiment: What was run.
        setup: The objects that the experiment names: data, model, policy, rule, engine.
        state: The state after the last round, with the global model's parameters.
        metrics: One line for each round, as in metrics.jsonl.
        folder: The run folder, or None if the run was only in memory.
    """

    experiment: Experiment
    setup: Setup = field(repr=False)
    state: State = field(repr=False)
    metrics: Metrics = field(repr=False)
    folder: Path | None = None

    def __repr__(self) -> str:
        results = ""
        if self._evaluated:
            results = f", accuracy={self.accuracy:.4f}, gamma_min={self.gamma_min}"
        return f"Run({self.experiment.name!r}, rounds={len(self.metrics)}{results})"

    @property
    def _evaluated(self) -> bool:
        return any("accuracy" in line for line in self.metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """The result in a few numbers, as in summary.json.

        Raises:
            RunError: If no round has finished.
        """
        return summarise(self.metrics)

    @property
    def accuracy(self) -> float:
        """The test accuracy of the global model at its last evaluation.

        Raises:
            RunError: If the model has not been evaluated yet.
        """
        accuracy = self.summary["accuracy"]
        if accuracy is None:
            raise RunError(
                f"the model has not been evaluated in its {self.state.round} rounds: "
                "see evaluate_every"
            )
        return float(accuracy)

    @property
    def gamma_min(self) -> int:
        """The smallest number of clients that trained any one parameter in any round.

        Raises:
            RunError: If no round has finished.
        """
        return int(self.summary["gamma_min"])

    def model(self, *, averaged: bool = False) -> nn.Module:
        """Return the trained global model, ready to use.

        Args:
            averaged: Whether to return the mean of the models over rounds; see the field `average`.

        Returns:
            A module in evaluation mode.

        Raises:
            RunError: If the run has no averaged model.
        """
        return eval_model(self.setup.task, self._state(averaged), FULL_REDUCTION, 1.0)

    def submodel(self, capacity: float, *, averaged: bool = False) -> nn.Module:
        """Return the part of the trained model that a device of some capacity holds.

        Args:
            capacity: The device's capacity, in (0, 1].
            averaged: Whether to return a part of the averaged model.

        Returns:
            A module in evaluation mode.

        Raises:
            InvalidValue: If the capacity is out of range, or the policy has no part for it.
            RunError: If the run has no averaged model.
        """
        part = self.part(capacity, averaged=averaged)
        return eval_model(self.setup.task, self._state(averaged), part, capacity)

    def _state(self, averaged: bool) -> State:
        return with_averaged_params(self.state) if averaged else self.state

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the run's curves.

        Args:
            path: A file to write the figure to, such as a .png, .svg or .pdf.

        Returns:
            The matplotlib figure.

        Raises:
            FedcoverError: If matplotlib is missing or the file cannot be written.
            InvalidValue: If matplotlib cannot write that kind of file.
        """
        figure = plotting.draw({self.experiment.name: [self.metrics]})
        if path is not None:
            plotting.save_figure(figure, path)
        return figure

    def part(self, capacity: float, *, averaged: bool = False) -> Reduction:
        """Return the reduction that the policy assigns to a device of some capacity.

        Args:
            capacity: The device's capacity, in (0, 1].
            averaged: Whether the policy sees the weights of the averaged model.

        Returns:
            The reduction, which says what of the model such a device holds.

        Raises:
            InvalidValue: If the capacity is out of range, or the policy has no part for it.
            RunError: If the run has no averaged model.
        """
        state = self._state(averaged)
        if not isinstance(capacity, int | float) or not 0 < capacity <= 1:
            raise InvalidValue(f"capacity must be in (0, 1]; got {capacity!r:.80}")
        if capacity == 1:
            return FULL_REDUCTION
        reduction = reduction_for_capacity(self.setup, state, capacity)
        view = view_of(self.setup, state, cohort_of(self.setup, state.round))
        if reduction is None or not fits(view, capacity, reduction):
            raise InvalidValue(
                f"this run trains no part for a device of capacity {capacity:g}: its policy "
                f"{self.experiment.policy!r} gives it none, or more than it can hold"
            )
        return reduction
