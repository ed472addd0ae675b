"""Random crops and flips of image batches: drawn on the CPU so that all devices see the same, applied on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue

PADDING = 4


@dataclass(frozen=True, slots=True)
class Augmentation:
    """A few integers for each sample, and what they make of a batch; apart, so that steps can be replayed."""

    draw: Callable[[int, torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


def draw_nothing(samples: int, draw: torch.Generator) -> Tensor:
    """No integers."""
    return torch.empty(samples, 0, dtype=torch.int64)


def unchanged(x_B: Tensor, drawn_B0: Tensor) -> Tensor:
    """The samples as they are."""
    return x_B


def draw_crop_flip(samples: int, draw: torch.Generator) -> Tensor:
    """How far each image is shifted down and right, and whether it is mirrored.

    >>> draw_crop_flip(5, torch.Generator().manual_seed(0)).shape
    torch.Size([5, 3])
    """
    shift_N2 = torch.randint(2 * PADDING + 1, (samples, 2), generator=draw)
    return torch.cat([shift_N2, torch.randint(2, (samples, 1), generator=draw)], dim=1)


def crop_flip(x_BCHW: Tensor, drawn_B3: Tensor) -> Tensor:
    """A crop out of a border of four zeros, mirrored or not.

    >>> crop_flip(torch.ones(2, 3, 8, 8), torch.tensor([[0, 8, 1], [4, 4, 0]])).shape
    torch.Size([2, 3, 8, 8])
    """
    if x_BCHW.ndim != 4:
        raise InvalidValue(
            f"augment crop-flip needs images (channels, height, width); got {tuple(x_BCHW.shape[1:])}"
        )
    batch, _, height, width = x_BCHW.shape
    device = x_BCHW.device
    padded = F.pad(x_BCHW, (PADDING,) * 4)
    row_BH = torch.arange(height, device=device) + drawn_B3[:, :1]
    along_W = torch.arange(width, device=device)
    column_BW = drawn_B3[:, 1:2] + torch.where(drawn_B3[:, 2:] > 0, width - 1 - along_W, along_W)
    which_B = torch.arange(batch, device=device)
    return padded[which_B[:, None, None], :, row_BH[:, :, None], column_BW[:, None, :]].permute(
        0, 3, 1, 2
    )


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(draw_nothing, unchanged),
    "crop-flip": Augmentation(draw_crop_flip, crop_flip),
}
