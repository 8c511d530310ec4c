"""Random crop and flip as plain integers: one row an image, drawn once for a whole epoch.

A row is (index, top, left, flip): which image, where its crop starts in the zero-padded image, and
whether it is mirrored (1) or not (0). Rows are drawn on the CPU, so that every device gives the
same epoch; applying them is one gather of fixed shape, which a CUDA graph can hold.
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

__all__ = ["crop_and_flip", "derive_seed", "draw_rows", "pad_images", "to_float"]


def derive_seed(*parts: int | str) -> int:
    """Hash the parts to a 63-bit seed: neighbouring seeds and epochs get unrelated streams."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def draw_rows(
    num_images: int, *, seed: int, epoch: int, pad: int, flip: bool
) -> Int64[Tensor, "n 4"]:
    """Draw the order, the crops and the flips of one epoch, a pure function of (seed, epoch).

    All three are always drawn, so that switching one off leaves the others as they were.
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


def to_float(
    images: UInt8[Tensor, "b h w 3"], dtype: torch.dtype, channels_last: bool
) -> Float[Tensor, "b 3 h w"]:
    """Bytes, channels last, to floats in [0, 1], [b, 3, h, w] in the memory format asked for."""
    x = images.permute(0, 3, 1, 2)
    x = x if channels_last else x.contiguous()
    return x.to(dtype).div_(255)
