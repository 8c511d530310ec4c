# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel for the costs of all pairs of a batch, by tiles, for the solvers that read them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.triton.common import Tiling, cost_tile

__all__ = ["pair_costs", "row_length"]


def cost_tiling(n: int, dtype: torch.dtype) -> Tiling:
    """Tiles of the cost; float32 takes more room, for its products are made of three."""
    if n <= 64 or dtype == torch.float32:
        return Tiling(rows=64, inner=64, channels=64 if n <= 64 else 32, num_warps=4)
    return Tiling(rows=128, inner=128, channels=32, num_warps=8)


def num_parts(n: int, c: int) -> int:
    """In how many parts the channels are summed: one tile a sample leaves a GPU half idle.

    So many that all parts together take no more than half of the features' own memory.
    """
    return min(4, triton.cdiv(c, 256)) if n <= 64 else 1


def pair_costs(features: Tensor, perm: Tensor, *, exchanged: bool) -> Tensor:
    """Squared distances of features [b, n, c] and their partners', [parts, b, n, row_length(n)].

    The cost is the sum of the parts, which are sums over channels. Rows are the anchor's positions,
    or the partner's where they are ``exchanged``; what lies beyond column n is not written.
    """
    b, n, c = features.shape
    parts = num_parts(n, c)
    shape = (parts, b, n, row_length(n))
    costs = torch.empty(shape, dtype=torch.float32, device=features.device)
    tiling = cost_tiling(n, features.dtype)
    tiles = triton.cdiv(n, tiling.rows)
    share = triton.cdiv(triton.cdiv(c, parts), tiling.channels) * tiling.channels
    _cost_kernel[(b * parts, tiles, tiles)](
        features, perm, costs, b, c, share, features.stride(0), stride_n=features.stride(1),
        stride_c=features.stride(2), n=n, LENGTH=costs.shape[3], EXCHANGED=exchanged,
        TILE=tiling.rows, BLOCK_C=tiling.channels, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    return costs


def row_length(m: int) -> int:
    """Rows start at multiples of 128 bytes, so that loads are as wide as the hardware has them."""
    return (m + 31) // 32 * 32


@triton.jit
def _cost_kernel(
    x_ptr, perm_ptr, cost_ptr, batch, c, share, stride_b, stride_n: tl.constexpr,
    stride_c: tl.constexpr, n: tl.constexpr, LENGTH: tl.constexpr, EXCHANGED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """C_ij = |x_i - y_j|^2, x the anchor and y the partner, or the other way round."""
    sample = (tl.program_id(0) % batch).to(tl.int64)
    first = tl.program_id(0) // batch * share
    c = tl.minimum(c, first + share)
    anchor = x_ptr + sample * stride_b
    partner = x_ptr + tl.load(perm_ptr + sample).to(tl.int64) * stride_b
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if EXCHANGED:
        C = cost_tile(partner, anchor, i, j, n, first, c, stride_n, stride_c, TILE, TILE, BLOCK_C)
    else:
        C = cost_tile(anchor, partner, i, j, n, first, c, stride_n, stride_c, TILE, TILE, BLOCK_C)
    cost_ptr += tl.program_id(0).to(tl.int64) * (n * LENGTH)
    pointers = cost_ptr + i[:, None] * LENGTH + j[None, :]
    tl.store(pointers, C, mask=(i < n)[:, None] & (j < n)[None, :])
