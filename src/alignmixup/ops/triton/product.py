# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels for products of plans and features: interpolation by a plan, and its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.size_classes import SizeClass, Tiling, channel_unit, size_class
from alignmixup.ops.triton.common import load_tile, padded, strides, transported

LOOKUP = 1024  # partners that a program of the gradient compares at a time


def tiling(n: int, dtype: torch.dtype) -> Tiling:
    """Return tiles of positions x channels; small tiles keep all SMs busy at small n."""
    if n <= 64:
        size = padded(n)
        return Tiling(size, size, channels=64, num_warps=4 if size == 64 else 2, num_stages=1)
    # With three stages at 784 positions, a third of the calls read operands that had not arrived
    # (Triton 3.6 on an H200); two stages were right in all.
    return Tiling(64, 32, channels=64 if dtype == torch.float32 else 128, num_warps=4, num_stages=2)


def mix(
    features: Tensor,
    perm: Tensor,
    lam: Tensor,
    plan: Tensor,
    keep_partner: bool,
    half: bool = False,
    entry: SizeClass | None = None,
) -> Tensor:
    """Interpolate features [b, n, c] with those of their partners, aligned by plans [b, n, n]."""
    b, n, c = features.shape
    out = torch.empty_like(features)
    half = half and features.dtype == torch.float32
    dtype = torch.bfloat16 if half else features.dtype  # of the products
    tile = tiling(n, dtype)
    if entry is not None and dtype != torch.float32:
        tile = entry.mix
    grid = (b, triton.cdiv(c, tile.channels), triton.cdiv(n, tile.rows))
    _mix_kernel[grid](
        features, perm, lam, plan, out, c, features.stride(0), out.stride(0),
        n=n, plan_stride_n=plan.stride(1), plan_stride_m=plan.stride(2), **strides(features, out),
        KEEP_PARTNER=keep_partner, BLOCK_N=tile.rows, BLOCK_K=tile.inner, BLOCK_C=tile.channels,
        UNIT=channel_unit(entry, c), HALF=half, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _mix_kernel(
    x_ptr, perm_ptr, lam_ptr, plan_ptr, out_ptr, c, stride_b, out_stride_b, n: tl.constexpr,
    plan_stride_n: tl.constexpr, plan_stride_m: tl.constexpr, stride_n: tl.constexpr,
    stride_c: tl.constexpr, out_stride_n: tl.constexpr,
    out_stride_c: tl.constexpr, KEEP_PARTNER: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out = lam A + (1 - lam) n P A', or lam n P' A + (1 - lam) A' if the partner is kept."""
    sample = tl.program_id(0).to(tl.int64)
    if UNIT > 1:
        c = c // UNIT * UNIT  # c is a multiple; now the compiler knows
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    lam = tl.load(lam_ptr + sample)
    anchor = x_ptr + sample * stride_b
    partner = x_ptr + tl.load(perm_ptr + sample).to(tl.int64) * stride_b
    plan = plan_ptr + sample * n * n
    if KEEP_PARTNER:
        aligned = transported(
            plan, anchor, rows, channels, n, c, plan_stride_m, plan_stride_n, stride_n, stride_c,
            BLOCK_N, BLOCK_C, BLOCK_K, HALF,
        )  # fmt: skip
        kept = load_tile(partner, rows, channels, n, c, stride_n, stride_c)
        mixed = lam * aligned + (1 - lam) * kept.to(tl.float32)
    else:
        aligned = transported(
            plan, partner, rows, channels, n, c, plan_stride_n, plan_stride_m, stride_n, stride_c,
            BLOCK_N, BLOCK_C, BLOCK_K, HALF,
        )  # fmt: skip
        kept = load_tile(anchor, rows, channels, n, c, stride_n, stride_c)
        mixed = lam * kept.to(tl.float32) + (1 - lam) * aligned
    out = out_ptr + sample * out_stride_b
    pointers = out + rows[:, None] * out_stride_n + channels[None, :] * out_stride_c
    tl.store(pointers, mixed.to(kept.dtype), mask=(rows < n)[:, None] & (channels < c)[None, :])


def backward(
    grad: Tensor,
    perm: Tensor,
    lam: Tensor,
    plan: Tensor,
    keep_partner: bool,
    half: bool = False,
) -> Tensor:
    """Return the gradient of the features [b, n, c]: of each sample as anchor plus as partner."""
    b, n, c = grad.shape
    out = torch.empty_like(grad)
    half = half and grad.dtype == torch.float32
    tile = tiling(n, torch.bfloat16 if half else grad.dtype)
    grid = (b, triton.cdiv(c, tile.channels), triton.cdiv(n, tile.rows))
    _backward_kernel[grid](
        grad, perm, lam, plan, out, b, c, grad.stride(0), out.stride(0),
        n=n, plan_stride_n=plan.stride(1), plan_stride_m=plan.stride(2), **strides(grad, out),
        KEEP_PARTNER=keep_partner, BLOCK_N=tile.rows, BLOCK_K=tile.inner, BLOCK_C=tile.channels,
        BLOCK_B=min(LOOKUP, triton.next_power_of_2(b)), UNIT=channel_unit(size_class(n), c),
        HALF=half, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _backward_kernel(
    grad_ptr, perm_ptr, lam_ptr, plan_ptr, out_ptr, batch, c, stride_b, out_stride_b,
    n: tl.constexpr, plan_stride_n: tl.constexpr, plan_stride_m: tl.constexpr,
    stride_n: tl.constexpr, stride_c: tl.constexpr, out_stride_n: tl.constexpr,
    out_stride_c: tl.constexpr, KEEP_PARTNER: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
    UNIT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """out_k = lam_k g_k + sum of (1 - lam_i) n P_i' g_i over the samples i with partner k;
    lam_k n P_k g_k + sum of (1 - lam_i) g_i if the partner is kept."""
    sample = tl.program_id(0).to(tl.int64)
    if UNIT > 1:
        c = c // UNIT * UNIT  # c is a multiple; now the compiler knows
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    lam = tl.load(lam_ptr + sample)
    own = grad_ptr + sample * stride_b
    if KEEP_PARTNER:
        plan = plan_ptr + sample * n * n
        total = lam * transported(
            plan, own, rows, channels, n, c, plan_stride_n, plan_stride_m, stride_n, stride_c,
            BLOCK_N, BLOCK_C, BLOCK_K, HALF,
        )  # fmt: skip
    else:
        total = lam * load_tile(own, rows, channels, n, c, stride_n, stride_c).to(tl.float32)
    # Find the samples whose partner this one is (one for a permutation): no extra launch, and no
    # atomics, so the order of the sum is fixed.
    for start in range(0, batch, BLOCK_B):
        i = start + tl.arange(0, BLOCK_B)
        partners = tl.load(perm_ptr + i, mask=i < batch, other=-1)
        anchor = tl.min(tl.where(partners == sample, i, batch), axis=0)
        while anchor < batch:
            share = 1 - tl.load(lam_ptr + anchor)
            other = grad_ptr + anchor.to(tl.int64) * stride_b
            if KEEP_PARTNER:
                part = load_tile(other, rows, channels, n, c, stride_n, stride_c)
                total += share * part.to(tl.float32)
            else:
                plan = plan_ptr + anchor.to(tl.int64) * n * n
                total += share * transported(
                    plan, other, rows, channels, n, c, plan_stride_m, plan_stride_n, stride_n,
                    stride_c, BLOCK_N, BLOCK_C, BLOCK_K, HALF,
                )  # fmt: skip
            anchor = tl.min(tl.where((partners == sample) & (i > anchor), i, batch), axis=0)
    out = out_ptr + sample * out_stride_b
    pointers = out + rows[:, None] * out_stride_n + channels[None, :] * out_stride_c
    inside = (rows < n)[:, None] & (channels < c)[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=inside)
