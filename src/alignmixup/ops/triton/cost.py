# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel for the costs of all pairs of a batch, by tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.size_classes import SizeClass, Tiling, channel_unit, num_parts as parts_of
from alignmixup.ops.triton.common import cost_tile, load_tile, paired_dot


def cost_tiling(n: int, dtype: torch.dtype) -> Tiling:
    """Return the tiles of the cost; float32 products take three passes and more memory."""
    if n <= 64 or dtype == torch.float32:
        return Tiling(rows=64, inner=64, channels=64 if n <= 64 else 32, num_warps=4)
    return Tiling(rows=128, inner=128, channels=32, num_warps=8)


def num_parts(n: int, c: int) -> int:
    """Return the number of partial sums over channels: one tile per sample leaves SMs idle.

    All parts together take at most half of the memory of the features.
    """
    return min(4, triton.cdiv(c, 256)) if n <= 64 else 1


def pair_costs(
    features: Tensor,
    perm: Tensor,
    *,
    exchanged: bool,
    half: bool = False,
    entry: SizeClass | None = None,
) -> Tensor:
    """Return squared distances between features [b, n, c] and those of their partners.

    The result [parts, b, n, row_length(n)] holds partial sums over channels. Rows are positions of
    the anchor, or of the partner if ``exchanged``; columns from n on are not written. With an
    ``entry`` of the size classes the rows are not padded: the costs can become the plan.
    """
    b, n, c = features.shape
    dtype = torch.bfloat16 if half else features.dtype  # of the products
    tiling = cost_tiling(n, dtype)
    parts, length = num_parts(n, c), row_length(n)
    if entry is not None:
        parts, length = parts_of(entry, n, c, features.dtype), n
        tiling = tiling if dtype == torch.float32 else entry.cost
    shape = (parts, b, n, length)
    costs = torch.empty(shape, dtype=torch.float32, device=features.device)
    tiles = triton.cdiv(n, tiling.rows)
    share = triton.cdiv(triton.cdiv(c, parts), tiling.channels) * tiling.channels
    _cost_kernel[(b * parts, tiles, tiles)](
        features, perm, costs, b, c, share, features.stride(0), stride_n=features.stride(1),
        stride_c=features.stride(2), n=n, LENGTH=costs.shape[3], EXCHANGED=exchanged,
        BY_ROW=entry is not None, PAIRS=dtype != torch.float32, UNIT=channel_unit(entry, c),
        TILE=tiling.rows, BLOCK_C=tiling.channels, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    return costs


def row_length(m: int) -> int:
    """Return the padded row length: rows start at multiples of 128 bytes, for wide loads."""
    return (m + 31) // 32 * 32


@triton.jit
def _cost_kernel(
    x_ptr, perm_ptr, cost_ptr, batch, c, share, stride_b, stride_n: tl.constexpr,
    stride_c: tl.constexpr, n: tl.constexpr, LENGTH: tl.constexpr, EXCHANGED: tl.constexpr,
    BY_ROW: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """C_ij = |x_i - y_j|^2, x the anchor and y the partner, or the reverse if EXCHANGED."""
    sample = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(0) // batch * share
    c = tl.minimum(c, first + share)
    if UNIT > 1:
        c = c // UNIT * UNIT  # c is a multiple; now the compiler knows
    anchor = x_ptr + sample * stride_b
    partner = x_ptr + tl.load(perm_ptr + sample).to(tl.int64) * stride_b
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if BY_ROW:
        x = partner if EXCHANGED else anchor
        y = anchor if EXCHANGED else partner
        C = _cost_tile_by_row(x, y, i, j, n, first, c, stride_n, stride_c, TILE, BLOCK_C, PAIRS)
    elif EXCHANGED:
        C = cost_tile(
            partner, anchor, i, j, n, first, c, stride_n, stride_c, TILE, TILE, BLOCK_C, PAIRS
        )
    else:
        C = cost_tile(
            anchor, partner, i, j, n, first, c, stride_n, stride_c, TILE, TILE, BLOCK_C, PAIRS
        )
    cost_ptr += tl.program_id(0).to(tl.int64) * (n * LENGTH)
    pointers = cost_ptr + i[:, None] * LENGTH + j[None, :]
    tl.store(pointers, C, mask=(i < n)[:, None] & (j < n)[None, :])


@triton.jit
def _cost_tile_by_row(
    x_base, y_base, rows, cols, n, first, c, stride_n, stride_c, TILE: tl.constexpr,
    BLOCK_C: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """C_ij = |x_i|^2 + |y_j|^2 - 2 <x_i, y_j>, both shifted by the first row of this tile's x.

    As ``cost_tile``, without a reduction in the loop: no mean, and the squares are summed once at
    the end. Any row near the others avoids the cancellation of large means.
    """
    dot = tl.zeros([TILE, TILE], tl.float32)
    x_square = tl.zeros([TILE, BLOCK_C], tl.float32)
    y_square = tl.zeros([TILE, BLOCK_C], tl.float32)
    center_base = x_base + tl.min(rows, axis=0) * stride_n
    for start in range(first, c, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        x = load_tile(x_base, rows, channels, n, c, stride_n, stride_c)
        y = load_tile(y_base, cols, channels, n, c, stride_n, stride_c)
        center = tl.load(center_base + channels * stride_c, mask=channels < c, other=0.0)
        center = center.to(tl.float32)[None, :]
        # Rows beyond n are finite and not stored.
        x = x.to(tl.float32) - center
        y = y.to(tl.float32) - center
        x_square += x * x
        y_square += y * y
        dot = paired_dot(x, y, dot, PAIRS)
    squares = tl.sum(x_square, axis=1)[:, None] + tl.sum(y_square, axis=1)[None, :]
    return tl.maximum(squares - 2 * dot, 0.0)
