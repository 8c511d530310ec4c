"""The residual generator of Gulrajani et al. (2017) as a decoder: a code to an image.

    code -> s x s map -> stages of residual blocks, each x2 by nearest neighbor -> BN, ReLU, conv

    block:  y = up(s(x)) + conv(ReLU(BN(conv(up(ReLU(BN(x)))))))

s is the identity, or a 1 x 1 convolution where the width changes; up is in the first block of a
stage. Widths halve as the side doubles, down to an eighth, and a stage has two blocks: the reverse
of the encoder (PreActResNet-18: 64, 128, 256, 512).
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.ops.norm_relu import norm_relu


class ResidualDecoder(nn.Module):
    """A code to an image in normalized space.

    The output is linear, not a sigmoid: the squared error is that of a Gaussian, nothing saturates
    at black and white, and an output of zero, where an untrained decoder starts, is the mean color.

    ``code_shape`` is (d,) for vectors, which a linear layer maps to an s x s map, s being 4 (for
    images of 32, 64, ...) or 7 (224). Tensors (c, t, t) start with a 1 x 1 convolution at t x t if
    t doubles to the side of the image; else the same linear layer reads them flattened.
    ``channels`` is the width of the s x s map.
    """

    def __init__(
        self, code_shape: tuple[int, ...], image_size: int, *, channels: int, num_blocks: int = 2
    ) -> None:
        super().__init__()
        for option, value in (("channels", channels), ("num_blocks", num_blocks)):
            if value < 1:
                raise ValueError(f"decoder {option} must be at least 1, got {value}")
        start = start_side(image_size)
        is_map = len(code_shape) == 3 and _doublings(code_shape[-1], image_size) is not None
        side = code_shape[-1] if is_map else start
        self.start: nn.Module
        if is_map:
            self.start = nn.Conv2d(code_shape[0], channels, 1)
        else:
            self.start = _Spread(code_shape, channels, start)
        stages: list[nn.Module] = []
        width = channels
        while side < image_size:
            side *= 2
            # The width depends only on the side; at least an eighth of the first.
            narrower = max(1, min(channels, max(channels * start // side, channels // 8)))
            blocks = [UpBlock(width, narrower, scale=2)]
            blocks += [UpBlock(narrower, narrower) for _ in range(num_blocks - 1)]
            stages.append(nn.Sequential(*blocks))
            width = narrower
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(width)
        self.to_image = ToImage(width, 3, 3, padding=1)

    def forward(self, code: Tensor) -> Float[Tensor, "b 3 h w"]:
        out: Tensor = self.stages(self.start(code))
        image: Tensor = self.to_image(norm_relu(self.norm, out))
        return image


def start_side(image_size: int) -> int:
    """Return the side of the first map of a decoder of such images."""
    for side in (4, 7):
        if image_size > side and _doublings(side, image_size) is not None:
            return side
    raise ValueError(
        f"a decoder doubles a map of 4 x 4 or 7 x 7 up to the image, and image_size={image_size} "
        "is neither 4 nor 7 times a power of two: use 32, 64, 128, ... or 28, 56, 112, 224, ..."
    )


def _doublings(side: int, image_size: int) -> int | None:
    """Return how often ``side`` doubles to ``image_size``; None if it does not."""
    times, rest = divmod(image_size, side)
    if rest or times & (times - 1):
        return None
    return times.bit_length() - 1


class _Spread(nn.Module):
    """A linear layer from a code to all positions of a square map."""

    def __init__(self, code_shape: tuple[int, ...], channels: int, side: int) -> None:
        super().__init__()
        dim = 1
        for size in code_shape:
            dim *= size
        self.shape = (channels, side, side)
        self.linear = nn.Linear(dim, channels * side * side)

    def forward(self, code: Float[Tensor, "b *rest"]) -> Float[Tensor, "b c s s"]:
        out: Tensor = self.linear(code.flatten(1))
        return out.view(-1, *self.shape)


class UpBlock(nn.Module):
    """A pre-activation block of two 3 x 3 convolutions, with upsampling by ``scale`` first."""

    def __init__(self, in_channels: int, channels: int, *, scale: int = 1) -> None:
        super().__init__()
        self.scale = scale
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, bias=False)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d i j"]:
        out = norm_relu(self.norm1, x)
        # 1 x 1 before upsampling: the same values at a quarter of the cost.
        skip: Tensor = x if self.shortcut is None else self.shortcut(x)
        if self.scale != 1:
            out = F.interpolate(out, scale_factor=float(self.scale), mode="nearest")
            skip = F.interpolate(skip, scale_factor=float(self.scale), mode="nearest")
        total: Tensor = skip + self.conv2(norm_relu(self.norm2, self.conv1(out)))
        return total


class ToImage(nn.Conv2d):
    """The last convolution, initialized to zero, so that the first image is the mean color.

    Initialized like the others it would start with images of five standard deviations.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
