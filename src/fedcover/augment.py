"""Random crops and flips of image batches, on the device; drawn on the CPU so that every device sees the same."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcover.errors import InvalidValue

PADDING = 4


def none(x_BCHW: Tensor, draw: torch.Generator) -> Tensor:
    """The images as they are."""
    return x_BCHW


def crop_flip(x_BCHW: Tensor, draw: torch.Generator) -> Tensor:
    """A random crop out of a border of four zeros, mirrored half of the time.

    >>> crop_flip(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    if x_BCHW.ndim != 4:
        raise InvalidValue(f"augment crop-flip needs images (channels, height, width); got {tuple(x_BCHW.shape[1:])}")
    batch, _, height, width = x_BCHW.shape
    device = x_BCHW.device
    shift_B2 = torch.randint(2 * PADDING + 1, (batch, 2), generator=draw)
    mirrored_B = torch.rand(batch, generator=draw) < 0.5
    padded = F.pad(x_BCHW, (PADDING,) * 4)
    row_BH = (torch.arange(height) + shift_B2[:, :1]).to(device)
    column_BW = torch.arange(width) + shift_B2[:, 1:]
    column_BW = torch.where(mirrored_B[:, None], column_BW.flip(1), column_BW).to(device)
    which_B = torch.arange(batch, device=device)
    return padded[which_B[:, None, None], :, row_BH[:, :, None], column_BW[:, None, :]].permute(0, 3, 1, 2)


AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {"none": none, "crop-flip": crop_flip}
