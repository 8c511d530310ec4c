"""Boxes drawn as fractions of an image, for the methods that cut: Cutout, CutMix and its kin.

A box stays on the device as coordinates and becomes a mask by comparison: no host sync, no slice
whose size depends on chance, so a cutting step is a fixed computation like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alignmixup.contracts import Draw

__all__ = ["BoxDraw", "box_mask", "image_size", "share_mask", "shown_share"]


@dataclass(frozen=True, slots=True)
class BoxDraw(Draw):
    """A draw with a box centre, (row, column) as fractions in [0, 1): one, or one a sample."""

    centre: Float[Tensor, "*boxes 2"]


def box_mask(
    centre: Float[Tensor, "*b 2"],
    height: Tensor | int,
    width: Tensor | int,
    image_size: tuple[int, int],
) -> Bool[Tensor, "*b h w"]:
    """Return where [c - size // 2, c + size // 2) lies inside the image, in rows and columns.

    ``centre`` falls on pixel floor(fraction * side); the box is clipped at the border.
    """
    rows, columns = image_size
    inside_rows = _span((centre[..., 0] * rows).floor(), height, rows)
    inside_columns = _span((centre[..., 1] * columns).floor(), width, columns)
    return inside_rows.unsqueeze(-1) & inside_columns.unsqueeze(-2)


def share_mask(
    centre: Float[Tensor, "*b 2"], lam: Float[Tensor, ""], image_size: tuple[int, int]
) -> Bool[Tensor, "*b h w"]:
    """Return the box that covers 1 - lam of the image before it is clipped, in its proportions."""
    side = (1 - lam).sqrt()
    height, width = ((length * side).floor() for length in image_size)
    return box_mask(centre, height, width, image_size)


def image_size(x: Tensor) -> tuple[int, int]:
    """Return rows and columns of a batch of images; a ``ValueError`` if it is none."""
    if x.ndim != 4:
        raise ValueError(f"images must be [b, c, h, w], got {list(x.shape)}")
    return x.shape[2], x.shape[3]


def shown_share(mask: Bool[Tensor, "*b h w"]) -> Float[Tensor, "*b"]:
    """The share of the image outside the box, exact after clipping."""
    return 1 - mask.float().mean((-2, -1))


def _span(centre: Tensor, size: Tensor | int, length: int) -> Tensor:
    half = size // 2 if isinstance(size, int) else size.div(2, rounding_mode="floor")
    positions = torch.arange(length, device=centre.device, dtype=centre.dtype)
    low, high = (centre - half).unsqueeze(-1), (centre + half).unsqueeze(-1)
    return (positions >= low) & (positions < high)
