# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Iterations of ``sinkhorn_rows.py`` that read T in blocks of rows.

16 samples of 28 x 28 positions have 39 MB of T, within the L2 cache of a large GPU. T is kept in
float32: in half precision its entries, and with them the plan, would be off by 1e-3 and more.
"""

import triton
import triton.language as tl

from alignmixup.ops.triton.common import NEG, reciprocal, safe_steps
from alignmixup.ops.triton.exchange import column_scalings, exchange, row_range
from alignmixup.ops.triton.tiles import (
    ROW_AXIS,
    column_indices,
    per_column,
    per_row,
    row_lse,
    row_minima,
    row_sums,
)


@triton.jit(do_not_specialize=["batch", "num_iters"])
def _streamed_kernel(
    costs_ptr, T_ptr, slots_ptr, scalings_ptr, used_ptr, batch, scale, num_iters, tol, stride_part,
    n: tl.constexpr, m: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    ONCE: tl.constexpr, HAS_TOL: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """P = a exp2(T + v) b, at T_ptr."""
    rank = tl.program_id(0) % GROUP
    group = tl.program_id(0) // GROUP
    slots = slots_ptr + group * (2 * GROUP * M)
    first = rank * SHARE
    end = tl.minimum(first + SHARE, n)
    j = column_indices(M, WIDTH)
    number = rank * 0 + 1  # of the next exchange
    sample = group.to(tl.int64)
    while sample < batch:
        base = T_ptr + sample * (n * m)
        costs = costs_ptr + sample * (n * m)
        a_ptr = scalings_ptr + sample * (2 * n)
        least = _minima_pass(costs, base, stride_part, first, end, j, m, BLOCK_N, PARTS, ONCE)
        least = exchange(least, j, m, slots, number, rank, GROUP, M, PACK, "min")
        v = tl.where(j < m, least * -scale, 0.0)
        b = v * 0 + 1
        current = 0  # the buffer of a
        at_one = rank * 0 + 1  # whether a and b are 1
        used = tl.minimum(num_iters, 1)
        if ONCE:
            sums = _softmax_pass(base, first, end, least, scale, j, m, BLOCK_N)
            sums = exchange(sums, j, m, slots, number + 1, rank, GROUP, M, PACK, "sum")
            b = 1 / (m * sums + tl.where(j < m, 0.0, 1.0))
            v = b * 0
            number += 2
        else:
            top, total = _log_pass(base, first, end, v, least, scale, j, n, m, BLOCK_N, True)
            v = column_scalings(top, total, j, slots, number + 1, rank, m, GROUP, M, PACK)
            number += 3
            v, b, current, at_one, used, number = _steps(
                base, a_ptr, first, end, v, j, slots, number, rank, num_iters, tol,
                n, m, BLOCK_N, M, GROUP, PACK, STAGES, HAS_TOL,
            )  # fmt: skip
        _plan_pass(base, a_ptr + current * n, first, end, v, b, at_one, j, m, BLOCK_N)
        tl.store(used_ptr + sample, used, mask=rank == 0)
        sample += tl.num_programs(0) // GROUP


@triton.jit
def _block(base, start, end, j, m: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of a block and their mask, pointers to its entries and their mask."""
    i = start + tl.arange(0, BLOCK_N)
    inside = per_row(i < end) & per_column(j < m)
    return i, i < end, base + per_row(i) * m + per_column(j), inside


@triton.jit
def _minima_pass(
    costs, base, stride_part, first, end, j, m: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Store sums of costs over parts less row minima, unless ONCE; own column minima."""
    least = j * 0.0 - NEG
    for start in range(first, end, BLOCK_N):
        _, _, at, inside = _block(base, start, end, j, m, BLOCK_N)
        _, _, parts, _ = _block(costs, start, end, j, m, BLOCK_N)
        C = tl.load(parts, mask=inside, other=-NEG)
        for part in tl.static_range(1, PARTS):
            C += tl.load(parts + part * stride_part, mask=inside, other=0.0)
        if not ONCE:
            C -= per_row(row_minima(C, inside))
        tl.store(at, C, mask=inside)
        least = tl.minimum(least, tl.min(tl.where(inside, C, -NEG), axis=ROW_AXIS))
    tl.debug_barrier()  # threads read what others have written
    return least


@triton.jit
def _softmax_pass(base, first, end, least, scale, j, m: tl.constexpr, BLOCK_N: tl.constexpr):
    """Replace costs by T = S; own column sums of exp2(T)."""
    sums = least * 0
    for start in range(first, end, BLOCK_N):
        _, _, at, inside = _block(base, start, end, j, m, BLOCK_N)
        C = tl.load(at, mask=inside, other=0.0)
        T = tl.where(inside, (C - per_column(least)) * -scale, NEG)
        tl.store(at, T, mask=inside)
        sums += tl.sum(tl.exp2(T), axis=ROW_AXIS)
    tl.debug_barrier()
    return sums


@triton.jit
def _log_pass(
    base, first, end, v, least, scale, j, n: tl.constexpr, m: tl.constexpr,
    BLOCK_N: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add the row scalings u of a log-domain iteration to T; own column maxima and sums.

    The FIRST converts costs to S.
    """
    top = v * 0 + NEG
    total = v * 0
    for start in range(first, end, BLOCK_N):
        _, rows, at, inside = _block(base, start, end, j, m, BLOCK_N)
        T = tl.load(at, mask=inside, other=NEG)
        if FIRST:
            T = tl.where(inside, (T - per_column(least)) * -scale, NEG)
        u = tl.where(rows, -tl.log2(tl.cast(n, tl.float32)) - row_lse(T + per_column(v)), 0.0)
        T += per_row(u)
        tl.store(at, T, mask=inside)
        # Running sums over rows, relative to the running maximum.
        new_top = tl.maximum(top, tl.max(T, axis=ROW_AXIS))
        total *= tl.exp2(top - new_top)
        total += tl.sum(tl.exp2(T - per_column(new_top)), axis=ROW_AXIS)
        top = new_top
    tl.debug_barrier()
    return top, total


@triton.jit
def _steps(
    base, a_ptr, first, end, v, j, slots, number, rank, num_iters, tol, n: tl.constexpr,
    m: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, STAGES: tl.constexpr, HAS_TOL: tl.constexpr,
):  # fmt: skip
    """The iterations after the first; v are column scalings that T lacks."""
    col_pad = tl.where(j < m, 0.0, 1 / m)
    b = col_pad * 0 + 1
    # Two buffers for a: several threads load what one of them stores, and a converged sample keeps
    # the previous a.
    current = rank * 0
    at_one = rank * 0 + 1
    used = 1
    remaining = num_iters - 1
    while remaining > 0:
        sums, low, high, error = _absorb_pass(
            base, a_ptr + current * n, a_ptr + (1 - current) * n, first, end, v + tl.log2(b),
            at_one, j, n, m, BLOCK_N,
        )  # fmt: skip
        low, high, error = row_range(low, high, error, slots, number, rank, GROUP, M)
        number += 1
        v = col_pad * 0
        b = col_pad * 0 + 1
        at_one = at_one * 0 + 1
        if HAS_TOL:
            remaining = tl.where(error > tol, remaining, 0)
        steps = tl.minimum(safe_steps(low, high, n), remaining)
        if steps > 0:
            # The pass above was the first of them.
            sums = exchange(sums, j, m, slots, number, rank, GROUP, M, PACK, "sum")
            b = reciprocal(m * (sums + col_pad))
            number += 1
            at_one = at_one * 0
            current = 1 - current
            taken = 1
            resting = 0
            while (taken < steps) & (resting == 0):
                sums, error = _linear_pass(
                    base, a_ptr + current * n, a_ptr + (1 - current) * n, first, end, b,
                    taken + 1 == steps, j, n, m, BLOCK_N, STAGES, HAS_TOL,
                )  # fmt: skip
                if HAS_TOL:
                    _, _, error = row_range(0.0, 0.0, error, slots, number, rank, GROUP, M)
                    number += 1
                    resting = tl.where(error > tol, 0, 1)
                if resting == 0:
                    sums = exchange(sums, j, m, slots, number, rank, GROUP, M, PACK, "sum")
                    b = reciprocal(m * (sums + col_pad))
                    number += 1
                    current = 1 - current
                    taken += 1
            used += taken
            remaining = tl.where(resting == 0, remaining - taken, 0)
        elif remaining > 0:
            top, total = _log_pass(base, first, end, v, v, 1.0, j, n, m, BLOCK_N, False)
            v = column_scalings(top, total, j, slots, number, rank, m, GROUP, M, PACK)
            number += 2
            used += 1
            remaining -= 1
    return v, b, current, at_one, used, number


@triton.jit
def _absorb_pass(
    base, a_ptr, new_a_ptr, first, end, v, at_one, j, n: tl.constexpr, m: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """T += log2 a + v, and a linear iteration up to its own column sums.

    Return these, the least and largest row sum of K, and the distance of its rows from uniform.
    """
    # Reduced once at the end.
    sums = per_row(tl.zeros([BLOCK_N], tl.float32)) + per_column(j * 0.0)
    low = 1.0 / n
    high = 1.0 / n
    error = 0.0
    for start in range(first, end, BLOCK_N):
        i, rows, at, inside = _block(base, start, end, j, m, BLOCK_N)
        a = tl.where(at_one > 0, 1.0, tl.load(a_ptr + i, mask=rows, other=1.0))
        T = tl.load(at, mask=inside, other=NEG)
        T += per_row(tl.log2(a)) + per_column(v)
        tl.store(at, T, mask=inside)
        K = tl.exp2(T)
        own = row_sums(K) + tl.where(rows, 0.0, 1 / n)
        low = tl.minimum(low, tl.min(own, axis=0))
        high = tl.maximum(high, tl.max(own, axis=0))
        error += tl.sum(tl.abs(own - 1 / n), axis=0)
        # The caller detects a zero sum and discards this step.
        a = reciprocal(n * tl.maximum(own, 1e-30))
        tl.store(new_a_ptr + i, a, mask=rows)
        sums += K * per_row(a)
    tl.debug_barrier()
    return tl.sum(sums, axis=ROW_AXIS), low, high, error


@triton.jit
def _linear_pass(
    base, a_ptr, new_a_ptr, first, end, b, is_last, j, n: tl.constexpr, m: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_TOL: tl.constexpr,
):  # fmt: skip
    """a = (1/n) / (K b), stored if it may be the last before an absorption.

    Return the own sums K' a, and the previous distance of the rows from uniform.
    """
    sums = per_row(tl.zeros([BLOCK_N], tl.float32)) + per_column(j * 0.0)
    error = 0.0
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        i, rows, at, inside = _block(base, start, end, j, m, BLOCK_N)
        K = tl.exp2(tl.load(at, mask=inside, other=NEG))
        own = row_sums(K * per_column(b)) + tl.where(rows, 0.0, 1 / n)
        if HAS_TOL:
            a = tl.load(a_ptr + i, mask=rows, other=1.0)
            error += tl.sum(tl.abs(a * own - 1 / n), axis=0)
        a = reciprocal(n * own)
        if HAS_TOL or is_last:
            tl.store(new_a_ptr + i, a, mask=rows)
        sums += K * per_row(a)
    tl.debug_barrier()
    return tl.sum(sums, axis=ROW_AXIS), error


@triton.jit
def _plan_pass(
    base, a_ptr, first, end, v, b, at_one, j, m: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """P = a exp2(T + v) b."""
    for start in range(first, end, BLOCK_N):
        i, rows, at, inside = _block(base, start, end, j, m, BLOCK_N)
        T = tl.load(at, mask=inside, other=NEG) + per_column(v)
        a = tl.where(at_one > 0, 1.0, tl.load(a_ptr + i, mask=rows, other=1.0))
        tl.store(at, per_row(a) * tl.exp2(T) * per_column(b), mask=inside)
