# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernel for 65 to 1024 positions where no size class runs (``ops/size_classes.py``).

One program per sample streams blocks of rows from the cache. The solver has two buffers, S and
K = exp2(S + u + v), and reads one of them once per iteration: a block of rows yields its row sums,
thus its part of u (or a), and with it its part of the column sums. The buffers of 128 samples of
14 x 14 positions fit the 50 MB L2 cache of a large GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.triton.common import LOG2_E, NEG, reciprocal, safe_steps

# Elements of S or K in registers at a time: 32 per thread, and as many sums, without spills.
BLOCK = 8192
NUM_WARPS = 8
NUM_STAGES = 3


def solve(costs: Tensor, plan: Tensor, eps: float, num_iters: int, tol: float | None) -> Tensor:
    """Fill ``plan`` [b, n, m], columns exact; return the number of iterations of each sample.

    ``costs`` [b, n, row_length(m)] are overwritten.
    """
    b, n, m = plan.shape
    kernel = torch.empty_like(costs)
    scalings = costs.new_empty(b, 4, n)
    used = torch.empty(b, dtype=torch.int32, device=plan.device)
    M = triton.next_power_of_2(m)
    _stream_kernel[(b,)](
        costs, kernel, scalings, plan, used, LOG2_E / eps, num_iters, tol or 0.0, *plan.stride(),
        n=n, m=m, LENGTH=costs.shape[2], BLOCK_N=BLOCK // M, M=M, STAGES=NUM_STAGES,
        ONCE=num_iters == 0, HAS_TOL=tol is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return used


@triton.jit(do_not_specialize=["num_iters"])
def _stream_kernel(
    S_ptr, K_ptr, scalings_ptr, plan_ptr, used_ptr, scale, num_iters, tol, plan_stride_b,
    plan_stride_n, plan_stride_m, n: tl.constexpr, m: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr, ONCE: tl.constexpr,
    HAS_TOL: tl.constexpr,
):  # fmt: skip
    """P = a exp2(S + u + v) b for S = -scale C; S_ptr initially holds C."""
    sample = tl.program_id(0).to(tl.int64)
    S_ptr += sample * (n * LENGTH)
    K_ptr += sample * (n * LENGTH)
    # Two buffers each for u and a: several threads load what one of them stores, and a converged
    # sample keeps the previous a.
    u_ptr = scalings_ptr + sample * (4 * n)
    a_ptr = u_ptr + 2 * n
    cols = tl.arange(0, M) < m
    col_pad = tl.where(cols, 0.0, 1 / m)
    least = _minima_pass(S_ptr, K_ptr, n, m, LENGTH, BLOCK_N, M, ONCE)
    v = tl.where(cols, least * -scale, 0.0)
    v = _log_pass(K_ptr, S_ptr, u_ptr, v, least, scale, n, m, LENGTH, BLOCK_N, M, ONCE, True)
    b = tl.full([M], 1.0, tl.float32)
    at_one = 1  # whether a and b are 1, as after a log-domain iteration
    absorbed = 0  # the buffer of u
    current = 0  # the buffer of a
    used = tl.minimum(num_iters, 1)
    remaining = num_iters - used
    while remaining > 0:
        v += tl.log2(b)
        sums, low, high, error = _absorb_pass(
            S_ptr, K_ptr, u_ptr + absorbed * n, u_ptr + (1 - absorbed) * n, a_ptr + current * n,
            a_ptr + (1 - current) * n, v, at_one, n, m, LENGTH, BLOCK_N, M,
        )  # fmt: skip
        absorbed = 1 - absorbed
        b = tl.full([M], 1.0, tl.float32)
        at_one = 1
        if HAS_TOL:
            remaining = tl.where(error > tol, remaining, 0)
        steps = tl.minimum(safe_steps(low, high, n), remaining)
        if steps > 0:
            # The pass above was the first of them.
            at_one = 0
            taken = 1
            current = 1 - current
            b = reciprocal(m * (sums + col_pad))
            resting = 0
            while (taken < steps) & (resting == 0):
                sums, error = _linear_pass(
                    K_ptr, a_ptr + current * n, a_ptr + (1 - current) * n, b, taken + 1 == steps,
                    n, m, LENGTH, BLOCK_N, M, STAGES, HAS_TOL,
                )  # fmt: skip
                if HAS_TOL:
                    resting = tl.where(error > tol, 0, 1)
                if resting == 0:
                    current = 1 - current
                    b = reciprocal(m * (sums + col_pad))
                    taken += 1
            used += taken
            remaining = tl.where(resting == 0, remaining - taken, 0)
        elif remaining > 0:
            v = _log_pass(
                S_ptr, S_ptr, u_ptr + absorbed * n, v, least, scale,
                n, m, LENGTH, BLOCK_N, M, ONCE, False,
            )  # fmt: skip
            used += 1
            remaining -= 1
    plan_ptr += sample * plan_stride_b
    _plan_pass(
        S_ptr, u_ptr + absorbed * n, a_ptr + current * n, plan_ptr, v, b, at_one, plan_stride_n,
        plan_stride_m, n, m, LENGTH, BLOCK_N, M,
    )  # fmt: skip
    tl.store(used_ptr + sample, used)


@triton.jit
def _block(start, n: tl.constexpr, m: tl.constexpr, LENGTH: tl.constexpr,
           BLOCK_N: tl.constexpr, M: tl.constexpr):  # fmt: skip
    """Rows of a block and their mask, offsets of its entries and their mask."""
    i = start + tl.arange(0, BLOCK_N)
    j = tl.arange(0, M)
    return i, i < n, i[:, None] * LENGTH + j[None, :], (i < n)[:, None] & (j < m)[None, :]


@triton.jit
def _minima_pass(
    C_ptr, out_ptr, n: tl.constexpr, m: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Store costs less their row minima, unless ONCE; return the column minima."""
    least = tl.full([M], -NEG, tl.float32)
    for start in range(0, n, BLOCK_N):
        _, _, offsets, inside = _block(start, n, m, LENGTH, BLOCK_N, M)
        C = tl.load(C_ptr + offsets, mask=inside, other=-NEG)
        if not ONCE:
            C -= tl.min(C, axis=1)[:, None]
        tl.store(out_ptr + offsets, C, mask=inside)
        least = tl.minimum(least, tl.min(tl.where(inside, C, -NEG), axis=0))
    tl.debug_barrier()  # threads read what others have written
    return least


@triton.jit
def _log_pass(
    in_ptr, S_ptr, u_ptr, v, least, scale, n: tl.constexpr, m: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr, ONCE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """One log-domain iteration: store u and return v. The FIRST converts costs to S."""
    top = tl.full([M], NEG, tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in range(0, n, BLOCK_N):
        i, rows, offsets, inside = _block(start, n, m, LENGTH, BLOCK_N, M)
        S = tl.load(in_ptr + offsets, mask=inside, other=NEG)
        if FIRST:
            S = tl.where(inside, (S - least[None, :]) * -scale, NEG)
            tl.store(S_ptr + offsets, S, mask=inside)
        u = tl.zeros([BLOCK_N], tl.float32)
        if not ONCE:
            t = S + v[None, :]
            row_top = tl.max(t, axis=1)
            row_sum = tl.sum(tl.exp2(t - row_top[:, None]), axis=1)
            u = -tl.log2(tl.cast(n, tl.float32)) - row_top - tl.log2(row_sum)
            u = tl.where(rows, u, 0.0)
        tl.store(u_ptr + i, u, mask=rows)
        # Running sums over rows, relative to the running maximum.
        t = S + u[:, None]
        new_top = tl.maximum(top, tl.max(t, axis=0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(t - new_top[None, :]), axis=0)
        top = new_top
    tl.debug_barrier()
    v = -tl.log2(tl.cast(m, tl.float32)) - top - tl.log2(total)
    return tl.where(tl.arange(0, M) < m, v, 0.0)


@triton.jit
def _absorb_pass(
    S_ptr, K_ptr, u_ptr, new_u_ptr, a_ptr, new_a_ptr, v, at_one, n: tl.constexpr,
    m: tl.constexpr, LENGTH: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """u += log2 a, store K = exp2(S + u + v), and run a linear iteration up to its column sums.

    Return these, the least and largest row sum of K, and the distance of its rows from uniform.
    """
    sums = tl.zeros([BLOCK_N, M], tl.float32)  # reduced once at the end
    low = 1.0 / n
    high = 1.0 / n
    error = 0.0
    for start in range(0, n, BLOCK_N):
        i, rows, offsets, inside = _block(start, n, m, LENGTH, BLOCK_N, M)
        S = tl.load(S_ptr + offsets, mask=inside, other=NEG)
        a = tl.where(at_one > 0, 1.0, tl.load(a_ptr + i, mask=rows, other=1.0))
        u = tl.load(u_ptr + i, mask=rows, other=0.0) + tl.log2(a)
        tl.store(new_u_ptr + i, u, mask=rows)
        K = tl.exp2(S + u[:, None] + v[None, :])
        tl.store(K_ptr + offsets, K, mask=inside)
        row_sums = tl.sum(K, axis=1) + tl.where(rows, 0.0, 1 / n)
        low = tl.minimum(low, tl.min(row_sums, axis=0))
        high = tl.maximum(high, tl.max(row_sums, axis=0))
        error += tl.sum(tl.abs(row_sums - 1 / n), axis=0)
        # The caller detects a zero sum and discards this step.
        a = reciprocal(n * tl.maximum(row_sums, 1e-30))
        tl.store(new_a_ptr + i, a, mask=rows)
        sums += K * a[:, None]
    tl.debug_barrier()
    return tl.sum(sums, axis=0), low, high, error


@triton.jit
def _linear_pass(
    K_ptr, a_ptr, new_a_ptr, b, is_last, n: tl.constexpr, m: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
    HAS_TOL: tl.constexpr,
):  # fmt: skip
    """a = (1/n) / (K b), stored if it may be the last before an absorption.

    Return K' a, and the previous distance of the rows from uniform.
    """
    sums = tl.zeros([BLOCK_N, M], tl.float32)
    error = 0.0
    for start in tl.range(0, n, BLOCK_N, num_stages=STAGES):
        i, rows, offsets, inside = _block(start, n, m, LENGTH, BLOCK_N, M)
        K = tl.load(K_ptr + offsets, mask=inside, other=0.0)
        row_sums = tl.sum(K * b[None, :], axis=1) + tl.where(rows, 0.0, 1 / n)
        if HAS_TOL:
            a = tl.load(a_ptr + i, mask=rows, other=1.0)
            error += tl.sum(tl.abs(a * row_sums - 1 / n), axis=0)
        a = reciprocal(n * row_sums)
        if HAS_TOL or is_last:
            tl.store(new_a_ptr + i, a, mask=rows)
        sums += K * a[:, None]
    tl.debug_barrier()
    return tl.sum(sums, axis=0), error


@triton.jit
def _plan_pass(
    S_ptr, u_ptr, a_ptr, plan_ptr, v, b, at_one, stride_n, stride_m, n: tl.constexpr,
    m: tl.constexpr, LENGTH: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """P = a exp2(S + u + v) b."""
    j = tl.arange(0, M)
    for start in range(0, n, BLOCK_N):
        i, rows, offsets, inside = _block(start, n, m, LENGTH, BLOCK_N, M)
        S = tl.load(S_ptr + offsets, mask=inside, other=NEG)
        u = tl.load(u_ptr + i, mask=rows, other=0.0)
        a = tl.where(at_one > 0, 1.0, tl.load(a_ptr + i, mask=rows, other=1.0))
        P = a[:, None] * tl.exp2(S + u[:, None] + v[None, :]) * b[None, :]
        tl.store(plan_ptr + i[:, None] * stride_n + j[None, :] * stride_m, P, mask=inside)
