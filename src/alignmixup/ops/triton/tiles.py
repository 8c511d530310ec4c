# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Tiles of rows, slices and columns, and their sums.

A tile [rows, M] would share a row of more than 128 entries between warps. With slices of columns a
warp has whole rows, and the narrower a slice, the fewer threads share a row: the sum over it is
mostly within a thread. The slices must be the dimension that gets no threads. Triton gives threads
to the last one first, then up to 3.6 to the first and since 3.7 to the second.
"""

import math
import struct

import torch
import triton
import triton.language as tl

from alignmixup.ops.size_classes import HeldTiling
from alignmixup.ops.triton.common import (
    HAS_PTX,
    INTERPRETED,
    NEG,
    constexpr_function,
    padded,
    reciprocal,
)

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
ROW_AXIS = tl.constexpr(0 if VERSION < (3, 7) else 1)
SLICE_AXIS = tl.constexpr(1 if VERSION < (3, 7) else 0)


def tile_shape(m: int, num_warps: int, lanes: int) -> tuple[int, int]:
    """Return the rows of a tile of ``m`` columns and the width of its slices.

    ``lanes`` threads share a row, and each has its part of one row: Triton loads up to four numbers
    at a time, if all rows begin at a multiple of that.
    """
    vector = math.gcd(m, 4)
    width = min(padded(m), lanes * vector)
    return 32 * num_warps * vector // width, width


@triton.jit
def column_indices(M: tl.constexpr, WIDTH: tl.constexpr):
    """The columns [slices, up to WIDTH]."""
    W: tl.constexpr = M if M < WIDTH else WIDTH  # Triton 3.5 has no min of constants
    return tl.arange(0, M // W)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def per_row(x):
    """A value for each row, to combine with a tile; Triton 3.5 fails at x[:, None, None]."""
    return tl.expand_dims(tl.expand_dims(x, 1), SLICE_AXIS)


@triton.jit
def per_column(x):
    """A value for each column, to combine with a tile."""
    return tl.expand_dims(x, ROW_AXIS)


@triton.jit
def row_sums(x):
    return tl.sum(tl.sum(x, axis=SLICE_AXIS), axis=1)


@triton.jit
def row_lse(t):
    top = tl.max(tl.max(t, axis=SLICE_AXIS), axis=1)
    return top + tl.log2(row_sums(tl.exp2(t - per_row(top))))


@triton.jit
def row_minima(C, inside):
    return tl.min(tl.min(tl.where(inside, C, -NEG), axis=SLICE_AXIS), axis=1)


# ---- sums of rows --------------------------------------------------------------------------------
# tl.sum adds what the threads of a row have by shuffles, five per row for 32 threads, and then each
# thread computes the same scaling. Here each thread stores its sum, one thread adds those of a row,
# and its warp loads the scaling. That is right where a warp has whole rows.


@triton.jit
def row_scalings(
    K, b, i, n: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """a = (1/n) / (K b) for the rows of each tile, finite in the padding."""
    a = ()
    if PTX == "":
        for k in tl.static_range(TILES):  # first all sums, which do not wait for each other
            pad = tl.where(i < n - k * ROWS, 0.0, 1 / n)
            a += (per_row(reciprocal(n * (row_sums(K[k] * b) + pad))),)  # type: ignore[assignment]
    else:
        K += (b,)
        a = tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, K, dtype=_float32(TILES), is_pure=False, pack=COUNT
        )
    return a


@constexpr_function
def _float32(TILES):
    return (tl.float32,) * TILES


def row_scaling_code(n: int, m: int, tiling: HeldTiling) -> dict[str, str | int]:
    """Return the PTX, its constraints and the number of entries per thread and tile."""
    num_warps = tiling.num_warps
    rows, _ = tile_shape(m, num_warps, tiling.lanes)
    tiles, count = triton.cdiv(n, rows), rows * padded(m) // (32 * num_warps)
    if not (tiling.shared_sums and HAS_PTX.value) or torch.version.hip is not None:
        return {"ROW_PTX": "", "ROW_CONSTRAINTS": "", "ROW_COUNT": count}
    own = rows // num_warps  # rows of a warp in a tile
    lanes = 32 // own  # threads of a row
    stride, length = lanes + 4, triton.cdiv(tiles, 4) * 4  # so that loads of 16 bytes are aligned
    sums, words = tiles * own * stride, tiles * own * stride + own * length  # of a warp
    code = [".reg .b32 lane, base, at, group;", ".reg .pred mine;"]
    code += [f".reg .f32 x<{max(8, length)}>;"]
    code += [f".shared .align 16 .b32 memory[{num_warps * words}];", "mov.u32 base, memory;"]
    code += ["mov.u32 lane, %tid.x;", "shr.u32 at, lane, 5;", "and.b32 lane, lane, 31;"]
    code += [f"mad.lo.u32 base, at, {4 * words}, base;", f"shr.u32 group, lane, {_log2(lanes)};"]
    # Each thread stores its part of a row: [tile, row of the warp, thread].
    code += [f"mad.lo.u32 at, group, {stride - lanes}, lane;", "mad.lo.u32 at, at, 4, base;"]
    for k in range(tiles):
        K, b = (tiles + k) * count, 2 * tiles * count  # places of their entries
        code += [f"mul.f32 x0, ${K}, ${b};"]
        code += [f"fma.rn.f32 x0, ${K + e}, ${b + e}, x0;" for e in range(1, count)]
        code += [f"st.shared.f32 [at + {4 * k * own * stride}], x0;"]
    code += ["bar.warp.sync 0xffffffff;"]
    # One thread adds the parts of a row, and stores its scaling: [row of the warp, tile].
    for first in range(0, tiles * own, 32):
        code += [f"add.u32 at, lane, {first};", f"setp.lt.u32 mine, at, {tiles * own};"]
        code += [f"mad.lo.u32 at, at, {4 * stride}, base;"]
        code += [f"@mine ld.shared.v4.f32 {{{_list('x', 0)}}}, [at];"]
        for e in range(4, lanes, 4):
            code += [f"@mine ld.shared.v4.f32 {{{_list('x', 4)}}}, [at + {4 * e}];"]
            code += [f"add.f32 x{k}, x{k}, x{k + 4};" for k in range(4)]
        code += ["add.f32 x0, x0, x1;", "add.f32 x2, x2, x3;", "add.f32 x0, x0, x2;"]
        code += [f"mul.f32 x0, x0, {_hex(n)};", f"max.f32 x0, x0, {_hex(1e-30)};"]
        code += ["rcp.approx.ftz.f32 x0, x0;", f"add.u32 at, lane, {first};"]
        code += [f"and.b32 group, at, {own - 1};", f"shr.u32 at, at, {_log2(own)};"]
        code += [f"mad.lo.u32 at, group, {length}, at;", "mad.lo.u32 at, at, 4, base;"]
        code += [f"@mine st.shared.f32 [at + {4 * sums}], x0;"]
    code += ["bar.warp.sync 0xffffffff;"]
    code += [f"shr.u32 group, lane, {_log2(lanes)};", f"mad.lo.u32 at, group, {4 * length}, base;"]
    for k in range(0, tiles, 4):
        code += [f"ld.shared.v4.f32 {{{_list('x', k)}}}, [at + {4 * (sums + k)}];"]
    code += [f"mov.f32 ${k * count + e}, x{k};" for k in range(tiles) for e in range(count)]
    constraints = ",".join(["=f"] * (tiles * count) + ["f"] * ((tiles + 1) * count))
    return {"ROW_PTX": _scope(code), "ROW_CONSTRAINTS": constraints, "ROW_COUNT": count}


def _log2(x: int) -> int:
    return x.bit_length() - 1


def _hex(x: float) -> str:
    """A float32 in PTX."""
    return "0f" + struct.pack(">f", x).hex()


def _list(name: str, first: int) -> str:
    return ", ".join(f"{name}{first + k}" for k in range(4))


def _scope(code: list[str]) -> str:
    return "\n".join(["{", *code, "}"])


# ---- sums of columns -----------------------------------------------------------------------------
# tl.sum stores the partial sums of a column next to each other, so that the threads of a warp meet
# in one bank of the shared memory: at 196 positions that takes longer than all products. Here the
# columns are next to each other. Each thread stores its entries, adds whole columns after a
# barrier, and loads the sums of its own columns after another one. That is right for every layout
# in which no entry belongs to two threads, as with the rows of ``tile_shape``.


@triton.jit
def column_sums(x, i, j, M: tl.constexpr, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT):
    """The sums of the tile ``x`` over its rows, in each row; see ``column_sum_code``."""
    if PTX == "":
        y = per_row(i * 0.0) + per_column(tl.sum(x, axis=ROW_AXIS))
    else:
        # The columns that a thread loads together would share a bank too.
        place = per_column((j % 4) * (M // 4) + j // 4)
        y = tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, [x, per_row(i * M) + place, place], dtype=tl.float32, is_pure=False,
            pack=COUNT,
        )  # fmt: skip
    return y


def column_sum_code(rows: int, m: int, num_warps: int) -> dict[str, str | int]:
    """Return the PTX, its constraints and the number of entries per thread."""
    M, threads = padded(m), 32 * num_warps
    count = rows * M // threads
    if INTERPRETED or torch.version.hip is not None:
        return {"PTX": "", "CONSTRAINTS": "", "COUNT": count}
    constraints = ",".join(["=&f"] * count + ["f"] * count + ["r"] * (2 * count))
    # $0.. are the results, then come the entries, their places in the tile and in a row of sums.
    code = [".reg .b32 tile, at;", f".reg .f32 y<{rows}>;", ".reg .pred own;"]
    code += [f".shared .align 16 .b32 memory[{(rows + 1) * M}];", "mov.u32 tile, memory;"]
    for k in range(count):
        code += [f"mad.lo.u32 at, ${2 * count + k}, 4, tile;", f"st.shared.f32 [at], ${count + k};"]
    code += ["bar.sync 0;", "mov.u32 at, %tid.x;", f"setp.lt.u32 own, at, {M};"]
    code += ["mad.lo.u32 at, at, 4, tile;"]
    for first in range(0, M, threads):
        code += [f"@own ld.shared.f32 y{r}, [at + {4 * (r * M + first)}];" for r in range(rows)]
        step = 1
        while step < rows:
            code += [f"add.f32 y{r}, y{r}, y{r + step};" for r in range(0, rows - step, 2 * step)]
            step *= 2
        code += [f"@own st.shared.f32 [at + {4 * (rows * M + first)}], y0;"]
    code += ["bar.sync 0;"]
    for k in range(count):
        code += [f"mad.lo.u32 at, ${3 * count + k}, 4, tile;"]
        code += [f"ld.shared.f32 ${k}, [at + {4 * rows * M}];"]
    return {"PTX": _scope(code), "CONSTRAINTS": constraints, "COUNT": count}
