"""Augment image batches by random crops and flips.

The random numbers are drawn on the CPU, so that they do not depend on the device, and are applied
on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue

PADDING = 4


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Pair the random draw of an augmentation with its application, so that steps can be replayed.

    Attributes:
        draw: Draw a few integers for each sample.
        apply: Transform a batch by the integers of its samples.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


def draw_nothing(samples: int, draw: torch.Generator) -> Tensor:
    """Draw no integers."""
    return torch.empty(samples, 0, dtype=torch.int64)


def unchanged(x_B: Tensor, draws_B0: Tensor) -> Tensor:
    """Return the samples unchanged."""
    return x_B


def draw_crop_flip(samples: int, draw: torch.Generator) -> Tensor:
    """Draw for each image its shifts down and right, and whether it is mirrored.

    >>> draw_crop_flip(5, torch.Generator().manual_seed(0)).shape
    torch.Size([5, 3])
    """
    shift_N2 = torch.randint(2 * PADDING + 1, (samples, 2), generator=draw)
    mirror_N1 = torch.randint(2, (samples, 1), generator=draw)
    return torch.cat([shift_N2, mirror_N1], dim=1)


def crop_flip(x_BCHW: Tensor, draws_B3: Tensor) -> Tensor:
    """Crop each image after padding it with four zeros on every side, and mirror some images.

    >>> crop_flip(torch.ones(2, 3, 8, 8), torch.tensor([[0, 8, 1], [4, 4, 0]])).shape
    torch.Size([2, 3, 8, 8])
    """
    if x_BCHW.ndim != 4:
        raise InvalidValue(
            "augment crop-flip needs images (channels, height, width); "
            f"got {tuple(x_BCHW.shape[1:])}"
        )
    batch, _, height, width = x_BCHW.shape
    device = x_BCHW.device
    padded = F.pad(x_BCHW, (PADDING,) * 4)
    row_BH = torch.arange(height, device=device) + draws_B3[:, :1]
    column_W = torch.arange(width, device=device)
    mirrored_W = width - 1 - column_W
    column_BW = draws_B3[:, 1:2] + torch.where(draws_B3[:, 2:] > 0, mirrored_W, column_W)
    sample_B = torch.arange(batch, device=device)
    cropped_BHWC = padded[sample_B[:, None, None], :, row_BH[:, :, None], column_BW[:, None, :]]
    return cropped_BHWC.permute(0, 3, 1, 2)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(draw_nothing, unchanged),
    "crop-flip": Augmentation(draw_crop_flip, crop_flip),
}
