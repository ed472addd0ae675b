"""The tensors that one SGD step reads and writes. They keep their memory addresses.

Because the addresses never change, a compiled function or a captured CUDA graph stays valid for
every client whose values are copied in. Shape suffixes: T steps, C stacked clients, B rows of a
batch, K random numbers for each row.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcover.types import Carry, Params


@dataclass(slots=True, eq=False)
class StepTensors:
    """The state of training: all that an `SGDStep` reads or writes except the batch schedule.

    With stacked clients every tensor has a leading axis C, except `lr` (no axes) and `losses_T`
    (C comes after T).

    Attributes:
        params: The trained parameters.
        velocity: The momentum of each parameter.
        masks: Factors for gradients, for clients that train under masks.
        buffers: The buffers of stacked clients; a lone client keeps its own in its module.
        carry: What the recipe remembers from step to step.
        observed: The next `carry`, written during the step.
        x: The client's inputs, one row for each sample.
        y: The client's labels.
        lr: The learning rate.
        step: The number of steps done in this round.
        losses_T: The loss of each step.
    """

    params: Params
    velocity: Params
    masks: Params
    buffers: Params
    carry: Carry
    observed: Carry
    x: Tensor
    y: Tensor
    lr: Tensor
    step: Tensor
    losses_T: Tensor


@dataclass(slots=True, eq=False)
class BatchSchedule:
    """The rows of every step of one batch size, and the random numbers that augment them.

    Attributes:
        rows_TB: The row numbers of each step; [T, C, B] with stacked clients.
        drawn_TBK: The random numbers for each of these rows.
        cursor: The index of the next step, a tensor of one entry that the step itself advances.
    """

    rows_TB: Tensor
    drawn_TBK: Tensor
    cursor: Tensor
