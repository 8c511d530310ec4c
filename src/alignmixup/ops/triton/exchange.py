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

from alignmixup.ops.triton.common import HAS_PTX, constexpr_function

NUM_SCALARS = tl.constexpr(16)  # words of an exchange of scalars, padded


@triton.jit
def exchange(
    x, j, m, slots, number, rank, GROUP: tl.constexpr, M: tl.constexpr, PACK: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """Combine the ``x`` of all programs of the group by ``OP``; x[j] counts if j is less than m.

    ``slots`` are 2 x GROUP x M words, ``number`` is that of this exchange, ``rank`` that of this
    program. PACK divides the number of entries of a thread.
    """
    if GROUP > 1:
        slots += (number % 2) * (GROUP * M)
        stamp = number.to(tl.int64) << 32
        word = stamp | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(slots + rank * M + j, word, mask=j < m)
        words = _loaded(slots, j, m, stamp, GROUP, M)
        if HAS_PTX:
            words = _awaited(words, slots + tl.minimum(j, m - 1), number, GROUP, M, PACK)
            tl.debug_barrier()  # the next words are stored when all threads have read these
        else:
            while _oldest(words, GROUP) < stamp:
                words = _loaded(slots, j, m, stamp, GROUP, M)
        x = words[0].to(tl.int32).to(tl.float32, bitcast=True)
        for member in tl.static_range(1, GROUP):
            y = words[member].to(tl.int32).to(tl.float32, bitcast=True)
            x = _combined(x, y, j, OP)
        x = tl.where(j < m, x, 0.0)
    return x


@triton.jit
def _loaded(slots, j, m, stamp, GROUP: tl.constexpr, M: tl.constexpr):
    """The words of all programs; a word of an older exchange is less than ``stamp``."""
    words = ()
    for member in tl.static_range(GROUP):
        word = tl.load(slots + member * M + j, mask=j < m, other=stamp, volatile=True)
        words += (word,)  # type: ignore[assignment]
    return words


@triton.jit
def _oldest(words, GROUP: tl.constexpr):
    oldest = words[0]
    for member in tl.static_range(1, GROUP):
        oldest = tl.minimum(oldest, words[member])
    return tl.min(oldest)


@triton.jit
def _awaited(words, first, number, GROUP: tl.constexpr, M: tl.constexpr, PACK: tl.constexpr):
    """The values once all words have the ``number``; a thread waits for its own words alone."""
    words += (first, number)
    return tl.inline_asm_elementwise(
        _waiting_code(GROUP, M, PACK),
        _constraints(GROUP, PACK),
        words,
        dtype=_types(GROUP),
        is_pure=False,
        pack=PACK,
    )


@constexpr_function
def _types(GROUP):
    return (tl.int32,) * GROUP


@constexpr_function
def _constraints(GROUP, PACK):
    return ",".join(["=&r"] * (GROUP * PACK) + ["l"] * ((GROUP + 1) * PACK) + ["r"] * PACK)


@constexpr_function
def _waiting_code(GROUP, M, PACK):
    """PTX: load all words again until the least number is that of the exchange."""
    outputs = GROUP * PACK
    number = f"${2 * outputs + PACK}"
    lines = ["{", f".reg .b64 w<{outputs}>;", f".reg .b32 h<{outputs}>;"]
    lines += [".reg .b32 least;", ".reg .pred is_done;"]
    lines += [f"mov.b64 w{k}, ${outputs + k};" for k in range(outputs)]
    lines += ["CHECK:"]
    lines += [f"mov.b64 {{${k}, h{k}}}, w{k};" for k in range(outputs)]
    lines += ["mov.b32 least, h0;"]
    lines += [f"min.s32 least, least, h{k};" for k in range(1, outputs)]
    lines += [f"setp.ge.s32 is_done, least, {number};", "@is_done bra DONE;"]
    lines += [
        f"ld.volatile.global.b64 w{g * PACK + e}, [${2 * outputs + e} + {8 * g * M}];"
        for g in range(GROUP)
        for e in range(PACK)
    ]
    lines += ["bra CHECK;", "DONE:", "}"]
    return "\n".join(lines)


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
        every = exchange(own, j, 3, slots, number, rank, GROUP, M, 1, "range")
        low = tl.sum(tl.where(j == 0, every, 0.0), axis=0)
        high = tl.sum(tl.where(j == 1, every, 0.0), axis=0)
        error = tl.sum(tl.where(j == 2, every, 0.0), axis=0)
    return low, high, error


@triton.jit
def column_scalings(
    top, total, j, slots, number, rank, m: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    PACK: tl.constexpr,
):  # fmt: skip
    """v = -log2 m - lse of the columns; own maxima ``top``, sums ``total`` relative to them.

    Two exchanges.
    """
    highest = exchange(top, j, m, slots, number, rank, GROUP, M, PACK, "max")
    total = total * tl.exp2(top - highest)
    total = exchange(total, j, m, slots, number + 1, rank, GROUP, M, PACK, "sum")
    v = -tl.log2(tl.cast(m, tl.float32)) - highest - tl.log2(total)
    return tl.where(j < m, v, 0.0)
