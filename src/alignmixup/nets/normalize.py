"""Normalisation as the first layer of a network.

    z = (x - mean) / std,  a channel at a time,  x in [0, 1]

Images travel in [0, 1] everywhere else, so that attacks, style mixing, saliency and figures need no
special case. Mixing images is affine and commutes with this layer.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Normalize", "Rgb"]

Rgb = tuple[float, float, float]


class Normalize(nn.Module):
    """Take images in [0, 1] to zero mean and unit deviation by the source's ``mean`` and ``std``.

    Both are saved with the weights: a checkpoint read elsewhere sees images as it did in training.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Rgb, std: Rgb) -> None:
        super().__init__()
        if min(std) <= 0:
            raise ValueError(f"std must be positive in each channel, got {std}")
        # Three dimensions, not four: a channels_last conversion of the network leaves them alone,
        # and the result takes its memory format from the images.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, x: Tensor) -> Float[Tensor, "b 3 h w"]:
        if not x.is_floating_point():
            raise ValueError(f"images must be floats in [0, 1], got {x.dtype}; divide by 255 first")
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"
