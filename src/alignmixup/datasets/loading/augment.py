"""Random crops, flips and colors: drawn first, then applied to bytes.

A set in memory: a row is (index, top, left, flip), which image, where its crop starts in the
zero-padded image, and whether it is mirrored (1) or not (0). Rows are drawn on the CPU, so that an
epoch is the same on every device; applying them is one gather of fixed shape, which can be captured
in a CUDA graph.

A single decoded image: ``Colors`` has factors of brightness, contrast and saturation, their order,
and a shift of color along the principal axes of ImageNet's pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """Hash the parts to a 63-bit seed: neighboring seeds and epochs get unrelated streams."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def draw_rows(
    num_images: int, *, seed: int, epoch: int, pad: int, flip: bool
) -> Int64[Tensor, "n 4"]:
    """Draw the order, the crops and the flips of one epoch, a pure function of (seed, epoch).

    All three are always drawn, so that disabling one does not change the others.
    """
    rng = torch.Generator().manual_seed(derive_seed("epoch", seed, epoch))
    order = torch.randperm(num_images, generator=rng)
    corners = torch.randint(0, 2 * pad + 1, (num_images, 2), generator=rng)
    flips = torch.randint(0, 2, (num_images, 1), generator=rng)
    return torch.cat([order.unsqueeze(1), corners, flips * int(flip)], dim=1)


def pad_images(
    images: UInt8[Tensor, "n 3 h w"], pad: int, device: torch.device | str
) -> UInt8[Tensor, "n hp wp 3"]:
    """Copy images to the device, channels last, in a frame of ``pad`` zeros."""
    n, _, h, w = images.shape
    padded = torch.zeros(n, h + 2 * pad, w + 2 * pad, 3, dtype=torch.uint8, device=device)
    padded[:, pad : pad + h, pad : pad + w] = images.to(device).permute(0, 2, 3, 1)
    return padded


def crop_and_flip(
    padded: UInt8[Tensor, "n hp wp 3"],
    rows: Int64[Tensor, "b 4"],
    ys: Int64[Tensor, " h"],
    xs: Int64[Tensor, " w"],
) -> UInt8[Tensor, "b h w 3"]:
    """Gather the crop of each row; ``ys`` and ``xs`` are 0..h-1 and 0..w-1 on the device."""
    index, top, left, flip = rows.unbind(1)
    columns = torch.where(flip[:, None] == 1, xs.flip(0), xs)
    y = top[:, None] + ys
    x = left[:, None] + columns
    return padded[index[:, None, None], y[:, :, None], x[:, None, :]]


def to_float(images: UInt8[Tensor, "b h w 3"], channels_last: bool) -> Float[Tensor, "b 3 h w"]:
    """Convert bytes, channels last, to floats in [0, 1], [b, 3, h, w] in either memory format."""
    x = images.permute(0, 3, 1, 2)
    x = x if channels_last else x.contiguous()
    return x.to(torch.float32).div_(255)


@dataclass(frozen=True, slots=True)
class Colors:
    """A change of the colors of one image.

    ``factors`` are those of brightness, contrast and saturation (1: unchanged), applied in
    ``order``; ``shift`` is then added to red, green and blue in [0, 1].
    """

    factors: tuple[float, float, float]
    order: tuple[int, int, int]
    shift: tuple[float, float, float]


# Standard deviations of ImageNet's pixels along their principal axes, and the axes as columns of
# (red, green, blue) (Krizhevsky et al. 2012, as common training scripts have them).
AXIS_DEVIATIONS = (0.2175, 0.0188, 0.0045)
AXES = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))

# Weights of red, green and blue in a gray level (ITU-R BT.601).
GRAY = (0.299, 0.587, 0.114)


def draw_colors(jitter: float, lighting: float, rng: torch.Generator) -> Colors:
    """Draw factors uniform in 1 +- ``jitter`` in random order, and a shift along the axes.

    The shift along an axis is its standard deviation times a normal sample with std ``lighting``.
    Both are always drawn, so that disabling one does not change the other.
    """
    wide = {"generator": rng, "dtype": torch.float64}
    factors = (1 + jitter * (2 * torch.rand(3, **wide) - 1)).tolist()  # type: ignore[call-overload]
    order = torch.randperm(3, generator=rng).tolist()
    shares = lighting * torch.randn(3, **wide)  # type: ignore[call-overload]
    along = shares * torch.tensor(AXIS_DEVIATIONS, dtype=torch.float64)
    shift = (torch.tensor(AXES, dtype=torch.float64) @ along).tolist()
    return Colors(tuple(factors), tuple(order), tuple(shift))


def change_colors(image: UInt8[Tensor, "h w 3"], colors: Colors) -> UInt8[Tensor, "h w 3"]:
    """Apply ``colors``: each factor blends the image with black, its mean gray or its own grays.

    Levels are clipped to 0..255 after each of them.
    """
    levels = image.float()
    gray = levels.new_tensor(GRAY)
    for which in colors.order:
        factor = colors.factors[which]
        if which == 0:
            levels = factor * levels
        else:
            grays = (levels @ gray).unsqueeze(2)
            levels = torch.lerp(grays.mean() if which == 1 else grays, levels, factor)
        levels = levels.clamp(0, 255)
    shifted = levels + 255 * levels.new_tensor(colors.shift)
    return shifted.round().clamp(0, 255).to(torch.uint8)
