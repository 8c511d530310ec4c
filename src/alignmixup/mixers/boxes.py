"""Boxes of CutMix and its relatives as masks.

A box stays on the device and becomes a mask by comparison. There is no slice of random size, so the
step has fixed shapes and needs no synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.contracts import Draw, fusible


@dataclass(frozen=True, slots=True, eq=False)
class BoxDraw(Draw):
    """A draw with the center of a box, (row, column) in [0, 1): one per batch or per sample."""

    center: Float[Tensor, "*boxes 2"]


def box_mask(
    center: Float[Tensor, "*b 2"],
    height: Tensor | int,
    width: Tensor | int,
    size: tuple[int, int],
) -> Bool[Tensor, "*b h w"]:
    """Return [c - length // 2, c + length // 2) in rows and columns, clipped at the border.

    The center c is the pixel floor(fraction * side).
    """
    rows, columns = size
    in_rows = _span((center[..., 0] * rows).floor(), height, rows)
    in_columns = _span((center[..., 1] * columns).floor(), width, columns)
    return in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)


def _span(center: Tensor, length: Tensor | int, side: int) -> Tensor:
    half = length // 2 if isinstance(length, int) else length.div(2, rounding_mode="floor")
    positions = torch.arange(side, device=center.device, dtype=center.dtype)
    low, high = (center - half).unsqueeze(-1), (center + half).unsqueeze(-1)
    return (positions >= low) & (positions < high)


def share_mask(
    center: Float[Tensor, "*b 2"], lam: Float[Tensor, "*lam"], size: tuple[int, int]
) -> Bool[Tensor, "*b h w"]:
    """Return the box of CutMix: 1 - lam of the image before clipping, in its aspect ratio."""
    side = (1 - lam).sqrt()
    height, width = ((length * side).floor() for length in size)
    return box_mask(center, height, width, size)


def shown_share(mask: Bool[Tensor, "*b h w"]) -> Float[Tensor, "*b"]:
    """Return the share of the image outside the box, after clipping."""
    return 1 - mask.float().mean((-2, -1))


def paste(
    x: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"], box: Bool[Tensor, "*b h w"]
) -> Float[Tensor, "b c h w"]:
    """Return ``other`` inside the box and ``x`` outside; one box per batch or per sample."""
    return torch.where(box.expand(len(x), *box.shape[-2:]).unsqueeze(1), other, x)


@fusible
def paste_partner(
    x: Float[Tensor, "b c h w"], perm: Int[Tensor, " b"], mask: Bool[Tensor, "*b h w"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "*b"]]:
    """Return the partner inside the mask and ``x`` outside, and the share of ``x``."""
    return paste(x, x[perm], mask), shown_share(mask)
