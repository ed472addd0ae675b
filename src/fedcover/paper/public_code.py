"""The public implementation of the paper; each departure from Algorithm 1 is one switch.

- `argsort` uses the output of argsort as if it were ranks, so that its masks are random quarters
  of a layer.
- `wrong_net` trains policy 5's network for policies 6 and 7, so that half of what they upload
  started at zero.
- `unmasked` masks weights before and after local training, but never gradients: cut weights regrow
  meanwhile.
- `leak` keeps the reduced networks of the previous setting: in round 0 they start from its trained
  model.
- `zero` sets parameters that nobody covers to zero.
- `dropout` trains with dropout 0.5 before the ReLU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcover.errors import InvalidValue
from fedcover.policies.paper_regions import quarter_by_magnitude, regions_of_digit
from fedcover.submodels.reductions import Masks
from fedcover.types import Params, Reduction, View

SWITCHES = ("argsort", "wrong_net", "unmasked", "leak", "zero", "dropout")


@dataclass(frozen=True, eq=False)
class LooseMasks:
    """A mask as the public code uses it: the trained part, the start, and gradient masking."""

    trained: Masks
    start: Masks
    masked_gradients: bool
    leaked: Mapping[str, Tensor] = field(default_factory=dict)

    def extract(self, params: Mapping[str, Tensor]) -> Params:
        """Return the weights that the client starts from."""
        return self.start.extract(
            {name: self.leaked.get(name, tensor) for name, tensor in params.items()}
        )

    def add_into(self, target: Params, values: Params | None, scale: float) -> None:
        """Add the uploaded entries, which are those of the mask."""
        self.trained.add_into(target, values, scale)

    def mask(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries that count as covered."""
        return self.trained.mask(params)

    def gradient_mask(self) -> Mapping[str, Tensor]:
        """Return the mask of the gradients, or nothing if they are not masked."""
        return self.start.bits if self.masked_gradients else {}

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the number of uploaded entries."""
        return self.trained.sizes(params)


def public_code(
    view: View,
    *,
    codename: str,
    argsort: bool = False,
    wrong_net: bool = False,
    unmasked: bool = False,
    leaked: Params | None = None,
) -> Sequence[Reduction]:
    """Apply the pruning policy of a codename with departures of the public code.

    Without any departure it equals `regions`.
    """
    if len(view.cohort) != len(codename):
        raise InvalidValue(
            f"codename {codename} needs a cohort of {len(codename)}; "
            f"this one has {len(view.cohort)}"
        )
    rank = _argsort_as_rank if argsort else quarter_by_magnitude
    quarters = {name: rank(view.params[name]) for name in view.prunable}

    def mask(digit: str) -> Masks:
        regions = torch.tensor(regions_of_digit(digit))
        return Masks(
            {
                name: torch.isin(quarter, regions.to(quarter.device))
                for name, quarter in quarters.items()
            }
        )

    def reduction(digit: str) -> Reduction:
        start = mask("5") if wrong_net and digit in "67" else mask(digit)
        start_values = leaked if leaked and view.round == 0 and digit != "1" else {}
        return LooseMasks(mask(digit), start, not unmasked, start_values)

    reduction_by_digit = {digit: reduction(digit) for digit in set(codename)}
    return [reduction_by_digit[digit] for digit in codename]


def _argsort_as_rank(weight: Tensor) -> Tensor:
    """Return the quarters of the public code, which takes the output of argsort for ranks."""
    indices = weight.abs().flatten().argsort(stable=True)
    supposed_ranks = weight.numel() - 1 - indices
    return (supposed_ranks * 4 // weight.numel() + 1).view_as(weight)
