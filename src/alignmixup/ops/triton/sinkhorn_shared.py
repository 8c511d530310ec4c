# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Iterations of ``sinkhorn_rows.py`` with K in registers, T in memory."""

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
def _shared_kernel(
    costs_ptr, T_ptr, slots_ptr, scalings_ptr, used_ptr, batch, scale, num_iters, tol, stride_part,
    n: tl.constexpr, m: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr,
    M: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    ONCE: tl.constexpr, HAS_TOL: tl.constexpr, WIDTH: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """P = a exp2(T) b, at T_ptr."""
    rank = tl.program_id(0) % GROUP
    group = tl.program_id(0) // GROUP
    slots = slots_ptr + group * (2 * GROUP * M)
    i = rank * SHARE + tl.arange(0, BLOCK_N)
    j = column_indices(M, WIDTH)
    rows = (tl.arange(0, BLOCK_N) < SHARE) & (i < n)
    inside = per_row(rows) & per_column(j < m)
    number = rank * 0 + 1  # of the next exchange
    sample = group.to(tl.int64)
    while sample < batch:
        offsets = sample * (n * m) + per_row(i) * m + per_column(j)
        at = T_ptr + offsets
        C = tl.load(costs_ptr + offsets, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            C += tl.load(costs_ptr + part * stride_part + offsets, mask=inside, other=0.0)
        if not ONCE:
            C -= per_row(row_minima(C, inside))
        least = tl.min(tl.where(inside, C, -NEG), axis=ROW_AXIS)
        least = exchange(least, j, m, slots, number, rank, GROUP, M, PACK, "min")
        T = tl.where(inside, (C - per_column(least)) * -scale, NEG)
        if ONCE:
            K = tl.exp2(T)
            sums = exchange(
                tl.sum(K, axis=ROW_AXIS), j, m, slots, number + 1, rank, GROUP, M, PACK, "sum"
            )
            P = K / per_column(m * sums + tl.where(j < m, 0.0, 1.0))
            number += 2
            used = 0
        else:
            v = tl.where(j < m, least * -scale, 0.0)
            T = _log_step(T, v, rows, j, slots, number + 1, rank, n, m, GROUP, M, PACK)
            number += 3
            tl.store(at, T, mask=inside)
            a, b, used, number = _steps(
                at, inside, rows, j, slots, number, rank, num_iters, tol, n, m, GROUP, M, PACK,
                HAS_TOL,
            )  # fmt: skip
            tl.debug_barrier()  # threads read what others have written
            T = tl.load(at, mask=inside, other=NEG)
            P = per_row(a) * tl.exp2(T) * per_column(b)
        tl.debug_barrier()
        tl.store(at, P, mask=inside)
        tl.store(used_ptr + sample, used, mask=rank == 0)
        sample += tl.num_programs(0) // GROUP


@triton.jit
def _log_step(
    T, v, rows, j, slots, number, rank, n: tl.constexpr, m: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """T after a log-domain iteration from the column scalings v; two exchanges."""
    u = tl.where(rows, -tl.log2(tl.cast(n, tl.float32)) - row_lse(T + per_column(v)), 0.0)
    T += per_row(u)
    top = tl.max(T, axis=ROW_AXIS)
    total = tl.sum(tl.exp2(T - per_column(top)), axis=ROW_AXIS)
    return T + per_column(column_scalings(top, total, j, slots, number, rank, m, GROUP, M, PACK))


@triton.jit
def _steps(
    at, inside, rows, j, slots, number, rank, num_iters, tol, n: tl.constexpr,
    m: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, PACK: tl.constexpr,
    HAS_TOL: tl.constexpr,
):  # fmt: skip
    """The iterations after the first: a, b, their number, and that of the next exchange."""
    # Added to the sums of padded rows and columns: their scalings remain 1.
    row_pad = tl.where(rows, 0.0, 1 / n)
    col_pad = tl.where(j < m, 0.0, 1 / m)
    a = row_pad * 0 + 1
    b = col_pad * 0 + 1
    used = 1
    remaining = num_iters - 1
    while remaining > 0:
        tl.debug_barrier()
        T = tl.load(at, mask=inside, other=NEG)
        T += per_row(tl.log2(a)) + per_column(tl.log2(b))
        tl.debug_barrier()
        tl.store(at, T, mask=inside)
        a = row_pad * 0 + 1
        b = col_pad * 0 + 1
        K = tl.exp2(T)
        sums = row_sums(K) + row_pad
        low, high, error = row_range(
            tl.min(sums, axis=0), tl.max(sums, axis=0), tl.sum(tl.abs(sums - 1 / n), axis=0),
            slots, number, rank, GROUP, M,
        )  # fmt: skip
        number += 1
        if HAS_TOL:
            remaining = tl.where(error > tol, remaining, 0)
        steps = tl.minimum(safe_steps(low, high, n), remaining)
        if steps > 0:
            if HAS_TOL:
                taken = 0
                while (taken < steps) & (error > tol):
                    a, b = _linear_step(
                        K, sums, col_pad, j, slots, number, rank, n, m, GROUP, M, PACK
                    )
                    sums = row_sums(K * per_column(b)) + row_pad
                    error = tl.sum(tl.abs(a * sums - 1 / n), axis=0)
                    _, _, error = row_range(0.0, 0.0, error, slots, number + 1, rank, GROUP, M)
                    number += 2
                    taken += 1
                used += taken
                remaining = tl.where(error > tol, remaining - taken, 0)
            else:
                a, b = _linear_step(K, sums, col_pad, j, slots, number, rank, n, m, GROUP, M, PACK)
                for step in range(1, steps):
                    sums = row_sums(K * per_column(b)) + row_pad
                    a, b = _linear_step(
                        K, sums, col_pad, j, slots, number + step, rank, n, m, GROUP, M, PACK
                    )
                number += steps
                used += steps
                remaining -= steps
        elif remaining > 0:
            T = _log_step(T, col_pad * 0, rows, j, slots, number, rank, n, m, GROUP, M, PACK)
            tl.debug_barrier()
            tl.store(at, T, mask=inside)
            number += 2
            used += 1
            remaining -= 1
    return a, b, used, number


@triton.jit
def _linear_step(
    K, sums, col_pad, j, slots, number, rank, n: tl.constexpr, m: tl.constexpr,
    GROUP: tl.constexpr, M: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """a = (1/n) / sums and b = (1/m) / (K' a); one exchange."""
    a = reciprocal(n * sums)
    total = tl.sum(K * per_row(a), axis=ROW_AXIS)
    total = exchange(total, j, m, slots, number, rank, GROUP, M, PACK, "sum")
    return a, reciprocal(m * (total + col_pad))
