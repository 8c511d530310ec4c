# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels for up to 64 positions: one program per sample, all iterations in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.size_classes import Tiling
from alignmixup.ops.triton.common import (
    LOG2_E,
    cost_tile,
    half_dot,
    load_tile,
    padded,
    solve_tile,
    split,
    start_tile,
    strides,
)

MAX_POSITIONS = 64
# Up to here cost, iterations and interpolation are one launch. Beyond, the iterations need all
# registers, and the products need more programs than there are samples.
MAX_FUSED = 32


# One warp reduces a tile without a barrier; 64 x 64 exceeds the registers of one warp.
TILINGS = {size: Tiling(size, size, 64, warps) for size, warps in ((16, 1), (32, 2), (64, 4))}


def solve(costs: Tensor, plan: Tensor, eps: float, num_iters: int, tol: float | None) -> Tensor:
    """Fill ``plan`` [b, n, m], columns exact; return the number of iterations of each sample.

    ``costs`` [parts, b, n, at least m] are summed over their parts.
    """
    b, n, m = plan.shape
    used = torch.empty(b, dtype=torch.int32, device=plan.device)
    N, M = padded(n), padded(m)
    _sinkhorn_kernel[(b,)](
        costs, plan, used, LOG2_E / eps, num_iters, tol or 0.0, *costs.stride(), *plan.stride(),
        n=n, m=m, N=N, M=M, PARTS=len(costs), ONCE=num_iters == 0, HAS_TOL=tol is not None,
        num_warps=TILINGS[max(N, M)].num_warps,
    )  # fmt: skip
    return used


@triton.jit(do_not_specialize=["num_iters"])
def _sinkhorn_kernel(
    cost_ptr, plan_ptr, used_ptr, scale, num_iters, tol, cost_stride_part,
    cost_stride_b, cost_stride_n, cost_stride_m, plan_stride_b, plan_stride_n, plan_stride_m,
    n: tl.constexpr, m: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr,
    ONCE: tl.constexpr, HAS_TOL: tl.constexpr,
):  # fmt: skip
    """P = a exp2(S + u + v) b for S = -scale C, one sample per program."""
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    j = tl.arange(0, M)
    cost_ptr += sample * cost_stride_b
    C = load_tile(cost_ptr, i, j, n, m, cost_stride_n, cost_stride_m)
    for _ in range(1, PARTS):
        cost_ptr += cost_stride_part
        C += load_tile(cost_ptr, i, j, n, m, cost_stride_n, cost_stride_m)
    P, used = _plan(C, i < n, j < m, scale, num_iters, tol, n, m, ONCE, HAS_TOL)
    offsets = sample * plan_stride_b + i[:, None] * plan_stride_n + j[None, :] * plan_stride_m
    tl.store(plan_ptr + offsets, P, mask=(i < n)[:, None] & (j < m)[None, :])
    tl.store(used_ptr + sample, used)


@triton.jit
def _plan(
    C, rows, cols, scale, num_iters, tol, n: tl.constexpr, m: tl.constexpr, ONCE: tl.constexpr,
    HAS_TOL: tl.constexpr,
):  # fmt: skip
    """The plan, zero in the padding, and the number of iterations."""
    S, v = start_tile(C, rows, cols, scale, ONCE)
    if ONCE:
        K = tl.where(rows[:, None], tl.exp2(S), 0.0)
        P = K / (m * tl.sum(K, axis=0) + tl.where(cols, 0.0, 1.0))[None, :]
        used = 0
    else:
        P, used = solve_tile(S, v, rows, cols, num_iters, tol, n, m, HAS_TOL)
    return tl.where(rows[:, None] & cols[None, :], P, 0.0), used


def align_mix(
    features: Tensor,
    perm: Tensor,
    lam: Tensor,
    keep_partner: bool,
    eps: float,
    num_iters: int,
    tol: float | None,
    last: str,
) -> tuple[Tensor, Tensor]:
    """Return mixed features [b, n, c] in the dtype and strides of the input, and float32 plans."""
    b, n, c = features.shape
    out = torch.empty_like(features)
    plan = torch.empty(b, n, n, dtype=torch.float32, device=features.device)
    N = padded(n)
    tiling = TILINGS[N]
    _align_mix_kernel[(b,)](
        features, out, plan, perm, lam, c, LOG2_E / eps, num_iters, tol or 0.0,
        features.stride(0), out.stride(0), **strides(features, out), n=n, N=N,
        BLOCK_C=tiling.channels, KEEP_PARTNER=keep_partner, LAST_ROWS=last == "rows",
        ONCE=num_iters == 0, HAS_TOL=tol is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out, plan


@triton.jit(do_not_specialize=["num_iters"])
def _align_mix_kernel(
    x_ptr, out_ptr, plan_ptr, perm_ptr, lam_ptr, c, scale, num_iters, tol, stride_b, out_stride_b,
    stride_n: tl.constexpr, stride_c: tl.constexpr, out_stride_n: tl.constexpr,
    out_stride_c: tl.constexpr, n: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
    KEEP_PARTNER: tl.constexpr,
    LAST_ROWS: tl.constexpr, ONCE: tl.constexpr, HAS_TOL: tl.constexpr,
):  # fmt: skip
    """out = lam A + (1 - lam) n P A', or lam n P' A + (1 - lam) A' if the partner is kept."""
    sample = tl.program_id(0).to(tl.int64)
    lam = tl.load(lam_ptr + sample)
    anchor = x_ptr + sample * stride_b
    partner = x_ptr + tl.load(perm_ptr + sample).to(tl.int64) * stride_b
    i = tl.arange(0, N)
    inside = (i < n)[:, None] & (i < n)[None, :]
    PAIRS: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    plan_base = plan_ptr + sample * (n * n)
    if LAST_ROWS:
        C = cost_tile(partner, anchor, i, i, n, 0, c, stride_n, stride_c, N, N, BLOCK_C, PAIRS)
        P, _ = _plan(C, i < n, i < n, scale, num_iters, tol, n, n, ONCE, HAS_TOL)
        tl.store(plan_base + i[:, None] + i[None, :] * n, P, mask=inside)
    else:
        C = cost_tile(anchor, partner, i, i, n, 0, c, stride_n, stride_c, N, N, BLOCK_C, PAIRS)
        P, _ = _plan(C, i < n, i < n, scale, num_iters, tol, n, n, ONCE, HAS_TOL)
        tl.store(plan_base + i[:, None] * n + i[None, :], P, mask=inside)
    if KEEP_PARTNER:
        _mix(partner, anchor, out_ptr + sample * out_stride_b, P, 1 - lam, lam, i, c, stride_n,
             stride_c, out_stride_n, out_stride_c, n, BLOCK_C, not LAST_ROWS)  # fmt: skip
    else:
        _mix(anchor, partner, out_ptr + sample * out_stride_b, P, lam, 1 - lam, i, c, stride_n,
             stride_c, out_stride_n, out_stride_c, n, BLOCK_C, LAST_ROWS)  # fmt: skip


@triton.jit
def _mix(
    kept, moved, out, P, kept_share, moved_share, i, c, stride_n: tl.constexpr,
    stride_c: tl.constexpr, out_stride_n: tl.constexpr, out_stride_c: tl.constexpr,
    n: tl.constexpr, BLOCK_C: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out = kept_share * kept + moved_share * n P moved; P is transposed if TRANSPOSED."""
    R = n * P
    if TRANSPOSED:
        R = tl.trans(R)
    if moved.dtype.element_ty != tl.float32:
        R_high, R_low = split(R, moved.dtype.element_ty)
    for start in range(0, c, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        x = load_tile(moved, i, channels, n, c, stride_n, stride_c)
        if x.dtype == tl.float32:
            aligned = tl.dot(R, x, input_precision="tf32x3")
        else:
            aligned = half_dot(R_low, x, tl.zeros([i.shape[0], BLOCK_C], tl.float32))
            aligned = half_dot(R_high, x, aligned)
        y = load_tile(kept, i, channels, n, c, stride_n, stride_c)
        mixed = kept_share * y.to(tl.float32) + moved_share * aligned
        pointers = out + i[:, None] * out_stride_n + channels[None, :] * out_stride_c
        inside = (i < n)[:, None] & (channels < c)[None, :]
        tl.store(pointers, mixed.to(x.dtype), mask=inside)
