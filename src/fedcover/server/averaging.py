"""The averaged model: a mean of the server's models over rounds, entry by entry.

Under label skew the model of one round is mostly a draw, and the mean of many rounds is better by
far. It costs the clients nothing: they train from the plain model, as without averaging. The mean
is a part of a run's state, so that a resumed run has the same one.

An average is a function of its options that returns a `RateSchedule`: how much the newest model
counts after each round. To add one, add it to `AVERAGES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedcover.errors import InvalidValue, RunError
from fedcover.tensors import flatten_if_cuda, in_pieces, map_elementwise_named
from fedcover.types import Params, State

RateSchedule = Callable[[int, int], float | None]
"""Return the rate of the newest model, from the number of finished rounds and that of all rounds.

At rate 1 the average begins anew; None means that there is no average yet.
"""

MEAN = "mean"
"""The key of the averaged parameters in a run's state."""


def average_none() -> RateSchedule:
    """Keep no average."""
    return lambda round, rounds: None


def average_window(*, rounds: int = 20, start: int = 1) -> RateSchedule:
    """Use the mean of the models after the last `rounds` rounds of the run.

    Only one mean is held. It begins anew every `rounds` rounds, counted back from the end of the
    run, so that the last window is complete. In between it is the mean since then.

    Args:
        rounds: The length of a window.
        start: The first round whose model counts.
    """
    _check_start("window", start)
    if rounds < 1:
        raise InvalidValue(f"average window: rounds must be at least 1; got {rounds}")
    window = rounds

    def rate(round: int, rounds: int) -> float | None:
        if round < start:
            return None
        age_in_window = (round - rounds - 1) % window + 1
        return 1 / min(age_in_window, round - start + 1)

    return rate


def average_ema(*, decay: float = 0.9, start: int = 1) -> RateSchedule:
    """Use an exponential moving average of the models.

    Its first values are plain means, so that the first model does not count more than later ones.

    Args:
        decay: How much of the average remains after a round.
        start: The first round whose model counts.
    """
    _check_start("ema", start)
    if not 0 < decay < 1:
        raise InvalidValue(f"average ema: decay must be between 0 and 1; got {decay:g}")

    def rate(round: int, rounds: int) -> float | None:
        if round < start:
            return None
        return max(1 - decay, 1 / (round - start + 1))

    return rate


def _check_start(name: str, start: int) -> None:
    if start < 1:
        raise InvalidValue(f"average {name}: start is a round, counted from 1; got {start}")


AVERAGES: dict[str, Callable[..., RateSchedule]] = {
    "none": average_none,
    "window": average_window,
    "ema": average_ema,
}
"""All ways to average the model over rounds, by the name that an experiment gives them."""


def update_average(
    average: Mapping[str, Params], params: Params, rate: float | None
) -> dict[str, Params]:
    """Return the average after a round.

    Args:
        average: The average before, as in `State.average`; empty if there is none yet.
        params: The new parameters.
        rate: How much the new parameters count, from a `RateSchedule`.

    Returns:
        The averaged parameters, under the key `MEAN`; empty if there is none yet.
    """
    if rate is None:
        return {}
    if rate == 1 or MEAN not in average:
        return {MEAN: params}

    def move(old: Tensor, new: Tensor) -> dict[str, Tensor]:
        return {MEAN: torch.lerp(old, new, rate)}

    trees = [flatten_if_cuda(average[MEAN]), flatten_if_cuda(params)]
    return map_elementwise_named(in_pieces(move), *trees)


def with_averaged_params(state: State) -> State:
    """Return a state in which the averaged parameters are the parameters.

    It has no tracked norm statistics, which belong to the plain model: its evaluation calibrates
    them on training rows.

    Raises:
        RunError: If there is no average.
    """
    if MEAN not in state.average:
        raise RunError("this run has no averaged model: see the field average and its start")
    return replace(state, params=state.average[MEAN], statistics={})
