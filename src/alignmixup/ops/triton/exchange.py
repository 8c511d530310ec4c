# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Exchange of column sums between the programs of a group, one group per sample.

A value and the number of the exchange are one 64-bit word. A program stores its words and reads
those of its group until all have the number: there is no barrier and no counter. Two sets of words
take turns. A program stores its words of exchange e + 2 after it has read all words of e + 1, and
each of these was stored after its program had read the words of e, in the set that is overwritten
now. All programs add the words in the same order, so they make the same decisions, and results are
deterministic. Each launch starts from words of zero; exchanges are counted from one.

**No deadlock.** A group waits for its programs, so they must be resident together. The launch is
cooperative: the driver runs it only if all its programs are resident, and groups loop over samples
if there are more samples than resident groups.
"""

import triton
import triton.language as tl

from alignmixup.ops.triton.common import NEG

NUM_SCALARS = tl.constexpr(16)  # words of an exchange of scalars, padded


@triton.jit
def exchange(x, j, m, slots, number, rank, GROUP: tl.constexpr, M: tl.constexpr, OP: tl.constexpr):
    """Combine the ``x`` of all programs of the group by ``OP``; x[j] counts if j is less than m.

    ``slots`` are 2 x GROUP x M words, ``number`` is that of this exchange, ``rank`` that of this
    program.
    """
    if GROUP > 1:
        slots += (number % 2) * (GROUP * M)
        stamp = number.to(tl.int64) << 32
        word = stamp | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(slots + rank * M + j, word, mask=j < m)
        is_waiting = number > 0
        while is_waiting:
            oldest = tl.load(slots + j, mask=j < m, other=stamp, volatile=True)
            x = _value(oldest)
            for member in tl.static_range(1, GROUP):
                word = tl.load(slots + member * M + j, mask=j < m, other=stamp, volatile=True)
                oldest = tl.minimum(oldest, word)
                x = _combined(x, _value(word), j, OP)
            # A word of an older exchange is smaller.
            is_waiting = tl.max((oldest < stamp).to(tl.int32)) > 0
    return x


@triton.jit
def _value(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _combined(x, y, j, OP: tl.constexpr):
    if OP == "sum":
        z = x + y
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "max":
        z = tl.maximum(x, y)
    else:  # minimum, maximum and sum of the entries 0, 1 and 2
        z = tl.where(j == 0, tl.minimum(x, y), tl.where(j == 1, tl.maximum(x, y), x + y))
    return z


@triton.jit
def row_range(low, high, error, slots, number, rank, GROUP: tl.constexpr, M: tl.constexpr):
    """Least and largest row sum, and distance of all rows from uniform, over the group."""
    if GROUP > 1:
        j = tl.arange(0, NUM_SCALARS)
        own = tl.where(j == 0, low, tl.where(j == 1, high, error))
        every = exchange(own, j, 3, slots, number, rank, GROUP, M, "range")
        low = tl.sum(tl.where(j == 0, every, 0.0), axis=0)
        high = tl.sum(tl.where(j == 1, every, 0.0), axis=0)
        error = tl.sum(tl.where(j == 2, every, 0.0), axis=0)
    return low, high, error


@triton.jit
def column_scalings(
    top, total, j, slots, number, rank, m: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr
):
    """v = -log2 m - lse of the columns; own maxima ``top``, sums ``total`` relative to them.

    Two exchanges.
    """
    highest = exchange(top, j, m, slots, number, rank, GROUP, M, "max")
    total = total * tl.exp2(top - highest)
    total = exchange(total, j, m, slots, number + 1, rank, GROUP, M, "sum")
    v = -tl.log2(tl.cast(m, tl.float32)) - highest - tl.log2(total)
    return tl.where(j < m, v, 0.0)


# ---- tiles of rows x slices x columns ------------------------------------------------------------
# Triton gives threads to the columns of a slice first, then to rows: a warp has whole rows, where a
# tile [BLOCK_N, M] would share a row of more than 128 entries between warps. The narrower a slice,
# the fewer threads share a row, so the sum over it is mostly within a thread.


@triton.jit
def column_indices(M: tl.constexpr, WIDTH: tl.constexpr):
    """The columns [slices, up to WIDTH]."""
    W: tl.constexpr = M if M < WIDTH else WIDTH  # Triton 3.5 has no min of constants
    return tl.arange(0, M // W)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def per_row(x):
    """A value for each row, to combine with a tile; Triton 3.5 fails at x[:, None, None]."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1)


@triton.jit
def row_sums(x):
    return tl.sum(tl.sum(x, axis=1), axis=1)


@triton.jit
def row_lse(T, v):
    """lse_j(T_ij + v_j)."""
    t = T + v[None, :, :]
    top = tl.max(tl.max(t, axis=1), axis=1)
    return top + tl.log2(row_sums(tl.exp2(t - per_row(top))))


@triton.jit
def row_minima(C, inside):
    return tl.min(tl.min(tl.where(inside, C, -NEG), axis=1), axis=1)
