# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
"""Iterations with K in registers, one program per sample: 33 to 208 positions.

    T = S + u + v,   K = exp2(T),   a = (1/n) / (K b),   b = (1/m) / (K' a),   P = a K b

K is a tuple of tiles: 25 of 8 x 256 entries for 196 positions, 200 registers of each thread. T
contains the absorbed scalings and replaces the costs in place; in the end the plan replaces T. So
the plan is the only tensor of n x m entries per sample. Only b is kept between passes: a is
computed again from the b before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.size_classes import HeldTiling
from alignmixup.ops.triton.common import LOG2_E, NEG, padded, reciprocal, safe_steps
from alignmixup.ops.triton.tiles import (
    ROW_AXIS,
    column_indices,
    column_sum_code,
    column_sums,
    per_column,
    per_row,
    row_lse,
    row_minima,
    row_scaling_code,
    row_scalings,
    row_sums,
    tile_shape,
)

CHUNK = tl.constexpr(4)  # tiles that a pass over memory loads at a time


def solve(
    costs: Tensor,
    plan: Tensor,
    eps: float,
    num_iters: int,
    tol: float | None,
    tiling: HeldTiling,
) -> Tensor:
    """Fill ``plan`` [b, n, m], columns exact; return the number of iterations of each sample.

    ``costs`` [parts, b, n, m] are summed over their parts. Both are contiguous; the only part may
    share its memory with the plan.
    """
    parts, b, n, m = costs.shape
    rows, width = tile_shape(m, tiling.num_warps, tiling.lanes)
    used = torch.empty(b, dtype=torch.int32, device=costs.device)
    _held_kernel[(b,)](
        costs, plan, used, LOG2_E / eps, num_iters, tol or 0.0, costs.stride(0), n=n, m=m,
        ROWS=rows, TILES=triton.cdiv(n, rows), M=padded(m), WIDTH=width, PARTS=parts,
        ONCE=num_iters == 0, HAS_TOL=tol is not None,
        **column_sum_code(rows, m, tiling.num_warps), **row_scaling_code(n, m, tiling),
        num_warps=tiling.num_warps, maxnreg=tiling.max_registers,
    )  # fmt: skip
    return used


@triton.jit(do_not_specialize=["num_iters"])
def _held_kernel(
    costs_ptr, T_ptr, used_ptr, scale, num_iters, tol, stride_part, n: tl.constexpr,
    m: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ONCE: tl.constexpr, HAS_TOL: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
    ROW_PTX: tl.constexpr, ROW_CONSTRAINTS: tl.constexpr, ROW_COUNT: tl.constexpr,
):  # fmt: skip
    """P = a exp2(T) b, at T_ptr."""
    sample = tl.program_id(0).to(tl.int64)
    costs_ptr += sample * (n * m)
    T_ptr += sample * (n * m)
    i = tl.arange(0, ROWS)
    j = column_indices(M, WIDTH)
    at = per_row(i) * m + per_column(j)
    least = _minima_pass(costs_ptr, T_ptr, stride_part, at, i, j, n, m, ROWS, PARTS, ONCE)
    old = at * 0.0 + 1
    at_one = num_iters * 0 + 1  # whether a and b are 1
    used = num_iters * 0
    if ONCE:
        b = _softmax_pass(T_ptr, at, i, j, least, scale, n, m, ROWS)
    else:
        b, old, at_one, used = _steps(
            T_ptr, at, i, j, least, scale, num_iters, tol, n, m, ROWS, TILES, M, HAS_TOL, PTX,
            CONSTRAINTS, COUNT, ROW_PTX, ROW_CONSTRAINTS, ROW_COUNT,
        )  # fmt: skip
    _plan_pass(T_ptr, at, i, j, b, old, at_one, n, m, ROWS)
    tl.store(used_ptr + sample, used)


# ---- passes over T in memory ---------------------------------------------------------------------


@triton.jit
def _loaded(ptr, at, first, i, j, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr, COUNT):
    """COUNT tiles from the row ``first``, NEG in the padding, and their masks."""
    tiles = ()
    masks = ()
    for k in tl.static_range(COUNT):
        inside = per_row(i < n - first - k * ROWS) & per_column(j < m)
        tiles += (tl.load(ptr + (first + k * ROWS) * m + at, mask=inside, other=NEG),)
        masks += (inside,)
    return tiles, masks


@triton.jit
def _minima_pass(
    costs_ptr, T_ptr, stride_part, at, i, j, n: tl.constexpr, m: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Store sums of costs over parts less row minima, unless ONCE; column minima."""
    least = at * 0.0 - NEG
    for first in range(0, n, ROWS * CHUNK):
        costs, inside = _loaded(costs_ptr, at, first, i, j, n, m, ROWS, CHUNK)
        for k in tl.static_range(CHUNK):
            to = (first + k * ROWS) * m + at
            C = costs[k]
            for part in tl.static_range(1, PARTS):
                C += tl.load(costs_ptr + part * stride_part + to, mask=inside[k], other=0.0)
            if not ONCE:
                C -= per_row(row_minima(C, inside[k]))
            tl.store(T_ptr + to, C, mask=inside[k])
            least = tl.minimum(least, tl.where(inside[k], C, -NEG))
    tl.debug_barrier()  # threads read what others have written
    return per_column(tl.min(least, axis=ROW_AXIS))


@triton.jit
def _softmax_pass(
    T_ptr, at, i, j, least, scale, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr
):
    """Replace costs by T = S; b for a = 1."""
    total = at * 0.0
    for first in range(0, n, ROWS * CHUNK):
        costs, inside = _loaded(T_ptr, at, first, i, j, n, m, ROWS, CHUNK)
        for k in tl.static_range(CHUNK):
            T = tl.where(inside[k], (costs[k] - least) * -scale, NEG)
            tl.store(T_ptr + (first + k * ROWS) * m + at, T, mask=inside[k])
            total += tl.exp2(T)
    tl.debug_barrier()
    sums = per_column(tl.sum(total, axis=ROW_AXIS))
    return at * 0.0 + 1 / (m * sums + per_column(tl.where(j < m, 0.0, 1.0)))


@triton.jit
def _log_pass(
    T_ptr, at, i, j, v, least, factor, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr
):
    """T = (T - least) factor + u of a log-domain iteration from v; its column scalings."""
    top = at * 0.0 + NEG
    total = at * 0.0
    for first in range(0, n, ROWS * CHUNK):
        tiles, inside = _loaded(T_ptr, at, first, i, j, n, m, ROWS, CHUNK)
        for k in tl.static_range(CHUNK):
            T = tl.where(inside[k], (tiles[k] - least) * factor, NEG)
            u = -tl.log2(tl.cast(n, tl.float32)) - row_lse(T + v)
            T += per_row(tl.where(i < n - first - k * ROWS, u, 0.0))
            tl.store(T_ptr + (first + k * ROWS) * m + at, T, mask=inside[k])
            # Sums of each thread, relative to its running maximum.
            new_top = tl.maximum(top, T)
            total = total * tl.exp2(top - new_top) + tl.exp2(T - new_top)
            top = new_top
    tl.debug_barrier()
    highest = tl.max(top, axis=ROW_AXIS)
    total = tl.sum(total * tl.exp2(top - per_column(highest)), axis=ROW_AXIS)
    v = -tl.log2(tl.cast(m, tl.float32)) - highest - tl.log2(total)
    return per_column(tl.where(j < m, v, 0.0))


@triton.jit
def _plan_pass(
    T_ptr, at, i, j, b, old, at_one, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr
):
    """P = a exp2(T) b."""
    for first in range(0, n, ROWS * CHUNK):
        tiles, inside = _loaded(T_ptr, at, first, i, j, n, m, ROWS, CHUNK)
        for k in tl.static_range(CHUNK):
            K = tl.exp2(tiles[k])
            # Without iterations a row may be all zero; then a is 1, and not divided by zero.
            rows = (i < n - first - k * ROWS) & (at_one == 0)
            a = tl.where(at_one > 0, 1.0, _row_scalings(K, old, rows, n))
            tl.store(T_ptr + (first + k * ROWS) * m + at, per_row(a) * K * b, mask=inside[k])


# ---- iterations ----------------------------------------------------------------------------------


@triton.jit
def _steps(
    T_ptr, at, i, j, least, scale, num_iters, tol, n: tl.constexpr, m: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, HAS_TOL: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
    ROW_PTX: tl.constexpr, ROW_CONSTRAINTS: tl.constexpr, ROW_COUNT: tl.constexpr,
):  # fmt: skip
    """b, the b before it, whether a and b are 1, and the number of iterations."""
    v = tl.where(per_column(j < m), least * -scale, 0.0)
    factor = -scale
    b = at * 0.0 + 1
    old = at * 0.0 + 1  # not `b`: Triton would not carry a second name of b through the loop
    at_one = num_iters * 0 + 1
    used = num_iters * 0
    steps = num_iters * 0
    while used < num_iters:
        if steps == 0:
            v = _log_pass(T_ptr, at, i, j, v, least, factor, n, m, ROWS)
            least = v * 0
            factor = scale * 0 + 1
            used += 1
        K, low, high, error = _absorb(T_ptr, at, i, j, v, b, old, at_one, n, m, ROWS, TILES)
        v = v * 0
        b = at * 0.0 + 1
        old = at * 0.0 + 1
        at_one = at_one * 0 + 1
        if HAS_TOL:
            num_iters = tl.where(error > tol, num_iters, used)
        steps = tl.minimum(safe_steps(low, high, n), num_iters - used)
        if steps > 0:
            at_one = at_one * 0
            taken = 0
            while (taken < steps) & ((not HAS_TOL) | (error > tol)):
                old = b
                b = _linear_step(
                    K, b, i, j, n, m, ROWS, TILES, M, PTX, CONSTRAINTS, COUNT, ROW_PTX,
                    ROW_CONSTRAINTS, ROW_COUNT,
                )  # fmt: skip
                taken += 1
                if HAS_TOL:
                    error = _row_error(K, old, b, i, n, ROWS, TILES)
            used += taken
            if HAS_TOL:
                num_iters = tl.where(error > tol, num_iters, used)
    return b, old, at_one, used


@triton.jit
def _absorb(
    T_ptr, at, i, j, v, b, old, at_one, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """T += log2 a + log2 b + v; K, its least and largest row sum, the distance of its rows."""
    v += tl.log2(b)
    T, inside = _loaded(T_ptr, at, 0, i, j, n, m, ROWS, TILES)
    K = ()
    low = i * 0.0 + 1 / n
    high = i * 0.0 + 1 / n
    error = i * 0.0
    for k in tl.static_range(TILES):
        rows = i < n - k * ROWS
        a = tl.where(at_one > 0, 1.0, _row_scalings(tl.exp2(T[k]), old, rows, n))
        t = T[k] + (per_row(tl.log2(a)) + v)
        tl.store(T_ptr + k * ROWS * m + at, t, mask=inside[k])
        K += (tl.exp2(t),)
        sums = row_sums(K[k]) + tl.where(rows, 0.0, 1 / n)
        low = tl.minimum(low, sums)
        high = tl.maximum(high, sums)
        error += tl.abs(sums - 1 / n)
    tl.debug_barrier()
    return K, tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(error, axis=0)


@triton.jit
def _row_scalings(K, b, rows, n: tl.constexpr):
    """a = (1/n) / (K b), 1 in the padding."""
    return reciprocal(n * (row_sums(K * b) + tl.where(rows, 0.0, 1 / n)))


@triton.jit
def _linear_step(
    K, b, i, j, n: tl.constexpr, m: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    M: tl.constexpr, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
    ROW_PTX: tl.constexpr, ROW_CONSTRAINTS: tl.constexpr, ROW_COUNT: tl.constexpr,
):  # fmt: skip
    """The next b, 1 in the padding."""
    a = row_scalings(K, b, i, n, ROWS, TILES, ROW_PTX, ROW_CONSTRAINTS, ROW_COUNT)
    total = K[0] * a[0]
    for k in tl.static_range(1, TILES):
        total += K[k] * a[k]
    pad = per_column(tl.where(j < m, 0.0, 1 / m))
    return reciprocal(m * (column_sums(total, i, j, M, PTX, CONSTRAINTS, COUNT) + pad))


@triton.jit
def _row_error(K, old, b, i, n: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Distance of the rows of a K b from uniform."""
    error = i * 0.0
    for k in tl.static_range(TILES):
        rows = i < n - k * ROWS
        sums = row_sums(K[k] * b) + tl.where(rows, 0.0, 1 / n)
        error += tl.abs(_row_scalings(K[k], old, rows, n) * sums - 1 / n)
    return tl.sum(error, axis=0)
