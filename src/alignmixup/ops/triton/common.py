# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Shared by the transport kernels: costs of a tile, absorbed iterations, products with a plan.

Symbols as in ``_absorbed.py``, with logarithms to base 2, the native one of the hardware. The
columns are updated last; for the rows a kernel exchanges anchor and partner. Tensors are padded to
powers of two: there S is NEG, u and v are 0, a and b are 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
# As in `_absorbed.py`, but a GPU is not slow on subnormals. exp2 flushes to zero below e^-87, which
# could grow to e^(2 REACH - 87) = 2e-12 before the next absorption.
MAX_CHANGE = 15.0
REACH = 30.0


def padded(size: int) -> int:
    """Return the padded size of a tile: a power of two, at least the 16 of the matrix units."""
    return max(16, int(triton.next_power_of_2(size)))


def strides(x: Tensor, out: Tensor) -> dict[str, int]:
    """Return the strides within a sample; as constants they determine the width of loads."""
    return {
        "stride_n": x.stride(1),
        "stride_c": x.stride(2),
        "out_stride_n": out.stride(1),
        "out_stride_c": out.stride(2),
    }


NEG = tl.constexpr(-1e30)
LOW = tl.constexpr(math.exp(-MAX_CHANGE))
HIGH = tl.constexpr(math.exp(MAX_CHANGE))
REACH_2 = tl.constexpr(REACH * LOG2_E)


@triton.jit
def _probe():
    """An empty kernel whose type shows whether kernels are compiled or interpreted."""


INTERPRETED = not isinstance(_probe, triton.JITFunction)
# Triton 3.4 cannot generate PTX by a function, nor return several types.
constexpr_function = getattr(triton, "constexpr_function", triton.jit)
HAS_PTX = tl.constexpr(not INTERPRETED and hasattr(triton, "constexpr_function"))
# The interpreter stores bf16 as integers and would multiply those.
WIDEN = tl.constexpr(INTERPRETED)
HAS_RCP = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def reciprocal(x):
    """1 / x to the last bit; a division takes five more instructions."""
    if HAS_RCP:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1 / x
    return y


@triton.jit
def half_dot(x, y, total):
    """total + x y; products of half-precision numbers are exact in float32."""
    if WIDEN:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, total)


@triton.jit
def load_tile(base, positions, channels, n, c, stride_n, stride_c):
    """base[positions, channels], zero outside n x c."""
    inside = (positions < n)[:, None] & (channels < c)[None, :]
    pointers = base + positions[:, None] * stride_n + channels[None, :] * stride_c
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def split(x, dtype: tl.constexpr):
    """x as the sum of two half-precision numbers, to 2^-17 in bf16 and 2^-22 in fp16."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def paired_dot(x, y, total, PAIRS: tl.constexpr):
    """total + x y' of float32 numbers, from PAIRS of bf16 if half-precision features were meant.

    Pairs have 16 bits, the features 8 or 11: each product is accurate to 2^-17.
    """
    if PAIRS:
        x_high, x_low = split(x, tl.bfloat16)
        y_high, y_low = split(y, tl.bfloat16)
        total = half_dot(x_low, tl.trans(y_high), total)
        total = half_dot(x_high, tl.trans(y_low), total)
        total = half_dot(x_high, tl.trans(y_high), total)
    else:
        total = tl.dot(x, tl.trans(y), total, input_precision="tf32x3")
    return total


@triton.jit
def cost_tile(
    x_base, y_base, rows, cols, n, first, c, stride_n, stride_c, N: tl.constexpr,
    M: tl.constexpr, BLOCK_C: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """C_ij = |x_i|^2 + |y_j|^2 - 2 <x_i, y_j>, both shifted by the mean of this tile's x.

    Sums over the channels from ``first`` to ``c`` (exclusive).
    """
    dot = tl.zeros([N, M], tl.float32)
    x_square = tl.zeros([N], tl.float32)
    y_square = tl.zeros([M], tl.float32)
    count = tl.sum(tl.where(rows < n, 1.0, 0.0))
    for start in range(first, c, BLOCK_C):
        channels = start + tl.arange(0, BLOCK_C)
        x = load_tile(x_base, rows, channels, n, c, stride_n, stride_c)
        y = load_tile(y_base, cols, channels, n, c, stride_n, stride_c)
        # A common shift does not change the distances. Without it, features far from the origin,
        # as after a ReLU, cancel in the sum of squares and lose their digits.
        x = x.to(tl.float32)
        center = tl.sum(x, axis=0) / count
        x = tl.where((rows < n)[:, None], x - center[None, :], 0.0)
        y = tl.where((cols < n)[:, None], y.to(tl.float32) - center[None, :], 0.0)
        x_square += tl.sum(x * x, axis=1)
        y_square += tl.sum(y * y, axis=1)
        dot = paired_dot(x, y, dot, PAIRS)
    return tl.maximum(x_square[:, None] + y_square[None, :] - 2 * dot, 0.0)


@triton.jit
def start_tile(C, rows, cols, scale, ONCE: tl.constexpr):
    """S and v for the start u = v = 0, less the least costs (of columns only if ONCE)."""
    inside = rows[:, None] & cols[None, :]
    if not ONCE:
        C -= tl.min(tl.where(inside, C, -NEG), axis=1)[:, None]
    least = tl.min(tl.where(inside, C, -NEG), axis=0)
    S = tl.where(inside, (C - least[None, :]) * -scale, NEG)
    return S, tl.where(cols, least * -scale, 0.0)


@triton.jit
def log_rows(S, v):
    """lse_j(S_ij + v_j)."""
    t = S + v[None, :]
    top = tl.max(t, axis=1)
    return top + tl.log2(tl.sum(tl.exp2(t - top[:, None]), axis=1))


@triton.jit
def log_columns(S, u):
    """lse_i(S_ij + u_i)."""
    t = S + u[:, None]
    top = tl.max(t, axis=0)
    return top + tl.log2(tl.sum(tl.exp2(t - top[None, :]), axis=0))


@triton.jit
def safe_steps(low, high, n):
    """Number of safe linear iterations after an absorption with row sums low..high."""
    low *= n
    high *= n
    change = tl.maximum(tl.maximum(-tl.log2(low), tl.log2(high)), 1e-3)
    steps = (1.0 / change * REACH_2).to(tl.int32)
    return tl.where((low >= LOW) & (high <= HIGH), steps, 0)


@triton.jit
def solve_tile(
    S, v, rows, cols, num_iters, tol, n: tl.constexpr, m: tl.constexpr, HAS_TOL: tl.constexpr
):
    """All iterations in registers; return a_i exp2(S_ij + u_i + v_j) b_j and their number."""
    N: tl.constexpr = S.shape[0]
    M: tl.constexpr = S.shape[1]
    # Added to the sums of padded rows and columns: their scalings remain 1.
    row_pad = tl.where(rows, 0.0, 1 / n)
    col_pad = tl.where(cols, 0.0, 1 / m)
    u = tl.zeros([N], tl.float32)
    a = tl.full([N], 1.0, tl.float32)
    b = tl.full([M], 1.0, tl.float32)
    used = 0
    remaining = num_iters
    while remaining > 0:
        u += tl.log2(a)
        v += tl.log2(b)
        a = tl.full([N], 1.0, tl.float32)
        b = tl.full([M], 1.0, tl.float32)
        K = tl.exp2(S + u[:, None] + v[None, :])
        sums = tl.sum(K, axis=1) + row_pad
        if HAS_TOL:
            error = tl.sum(tl.abs(sums - 1 / n), axis=0)
            remaining = tl.where((used == 0) | (error > tol), remaining, 0)
        steps = safe_steps(tl.min(sums, axis=0), tl.max(sums, axis=0), n)
        steps = tl.where(used > 0, tl.minimum(steps, remaining), 0)
        if steps > 0:
            if HAS_TOL:
                taken = 0
                while (taken < steps) & (error > tol):
                    a = reciprocal(n * sums)
                    b = reciprocal(m * (tl.sum(K * a[:, None], axis=0) + col_pad))
                    sums = tl.sum(K * b[None, :], axis=1) + row_pad
                    error = tl.sum(tl.abs(a * sums - 1 / n), axis=0)
                    taken += 1
                used += taken
                remaining = tl.where(error > tol, remaining - taken, 0)
            else:
                a = reciprocal(n * sums)
                b = reciprocal(m * (tl.sum(K * a[:, None], axis=0) + col_pad))
                for _ in range(1, steps):
                    a = reciprocal(n * (tl.sum(K * b[None, :], axis=1) + row_pad))
                    b = reciprocal(m * (tl.sum(K * a[:, None], axis=0) + col_pad))
                used += steps
                remaining -= steps
        elif remaining > 0:
            u = tl.where(rows, -tl.log2(tl.cast(n, tl.float32)) - log_rows(S, v), 0.0)
            v = tl.where(cols, -tl.log2(tl.cast(m, tl.float32)) - log_columns(S, u), 0.0)
            used += 1
            remaining -= 1
    # a and b are not absorbed again: rounding of large u, v would lose the marginals.
    return a[:, None] * tl.exp2(S + u[:, None] + v[None, :]) * b[None, :], used


@triton.jit
def transported(
    plan_base, x_base, rows, channels, n, c, stride_row, stride_col, stride_n, stride_c,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """n sum_k plan[rows, k] x[k, channels] in float32: bf16 plans lose the marginals.

    HALF rounds x to bf16.
    """
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, n, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        R = n * load_tile(plan_base, rows, inner, n, n, stride_row, stride_col)
        x = load_tile(x_base, inner, channels, n, c, stride_n, stride_c)
        if HALF:
            x = x.to(tl.bfloat16)
        if x.dtype == tl.float32:
            total = tl.dot(R, x, total, input_precision="tf32x3")
        else:
            R_high, R_low = split(R, x.dtype)
            total = half_dot(R_low, x, total)
            total = half_dot(R_high, x, total)
    return total
