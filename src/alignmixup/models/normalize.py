"""The first layers of a network: normalization, and the convolution that reads images.

    z = (x - mean) / std,  per channel,  x in [0, 1]

Images are in [0, 1] everywhere else, so that attacks, style mixing, saliency and figures need no
special case. Mixing images is affine and commutes with this layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Rgb = tuple[float, float, float]


class Normalize(nn.Module):
    """Normalize images in [0, 1] by the ``mean`` and ``std`` of their data set.

    Both are buffers, saved with the weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Rgb, std: Rgb) -> None:
        super().__init__()
        if not (all(0 <= m <= 1 for m in mean) and all(0 < s < math.inf for s in std)):
            raise ValueError(
                "mean must lie in [0, 1] and std must be positive in each channel, "
                f"got {mean} and {std}; divide those of bytes by 255"
            )
        # Three dimensions, not four: a conversion to channels_last does not change them, and the
        # result has the memory format of the images.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, x: Tensor) -> Float[Tensor, "b 3 h w"]:
        if not x.is_floating_point():
            raise ValueError(f"images must be floats in [0, 1], got {x.dtype}; divide by 255 first")
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


class ImageConv(nn.Conv2d):
    """A convolution of images; on a GPU, their three channels are padded with zeros to eight.

    Tensor cores need a multiple of eight channels; three run a slower kernel, above all in the
    gradient of the weights. The values are the same.
    """

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        out: Tensor = self._padded(x) if x.is_cuda else super().forward(x)
        return out

    def _padded(self, x: Tensor) -> Tensor:
        zeros = (0, 0, 0, 0, 0, -self.in_channels % 8)
        out: Tensor = self._conv_forward(F.pad(x, zeros), F.pad(self.weight, zeros), self.bias)
        return out
