# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Co-Mixup's joint assignment: one launch with a program per part and restart, one for the shares.

The algorithm and symbols are those of ``ops/joint.py``. The inputs of a block are the bits of an
int32: one bit, or two for a half of each. Tiles have one column per label: the inputs, then the
halves of the three most shown inputs (01, 02, 12); further columns are padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.joint import HALF_BONUS, HALF_LIKENESS, NEVER, WORTH_IT

# Four warps for the sites of a 16 x 32 tile: labels are compared within a warp.
NUM_WARPS = 4

COST_OF_NONE = tl.constexpr(NEVER)
BONUS = tl.constexpr(HALF_BONUS)
LIKENESS = tl.constexpr(HALF_LIKENESS)
LEAST_GAIN = tl.constexpr(WORTH_IT)


def assign(
    unary: Tensor,
    compatibility: Tensor,
    is_real: Tensor,
    start: Tensor,
    beta: float,
    gamma: float,
    tau: float,
    is_soft: bool,
    num_iters: int,
    num_sweeps: int,
    half_labels: bool,
    resolve_ties: bool,
) -> Tensor:
    """Return the shares [p, N, s, N] of the best restart, for contiguous tensors."""
    restarts, parts, num, sites = start.shape
    side = round(sites**0.5)
    shown = torch.empty(restarts, parts, num, sites, dtype=torch.int32, device=unary.device)
    value = torch.empty(restarts, parts, dtype=torch.float32, device=unary.device)
    shares = torch.empty(parts, num, sites, num, dtype=torch.float32, device=unary.device)
    real = is_real.view(torch.uint8)
    S = max(16, int(triton.next_power_of_2(sites)))
    L = max(16, int(triton.next_power_of_2(num + 3)))
    N = max(16, int(triton.next_power_of_2(num)))
    _assign_kernel[(restarts * parts,)](
        unary, compatibility, real, start, shown, value, beta, gamma, tau, parts, num_iters,
        num_sweeps, num_iters - 1 if resolve_ties and num_iters > 1 else -1, num=num, side=side,
        S=S, L=L, N=N, SOFT=is_soft, HALVES=half_labels,
        num_warps=max(NUM_WARPS, min(8, S * L // 1024)),
    )  # fmt: skip
    _shares_kernel[(parts, num)](
        shown, value, real, shares, restarts, parts, num=num, sites=sites, S=S, L=L,
        R=max(2, int(triton.next_power_of_2(restarts))), num_warps=4,
    )  # fmt: skip
    return shares


@triton.jit(do_not_specialize=["parts", "num_iters", "num_sweeps", "tie_iter"])
def _assign_kernel(
    unary_ptr, compat_ptr, real_ptr, start_ptr, shown_ptr, value_ptr, beta, gamma, tau, parts,
    num_iters, num_sweeps, tie_iter, num: tl.constexpr, side: tl.constexpr, S: tl.constexpr,
    L: tl.constexpr, N: tl.constexpr, SOFT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Cut each output given the others, num_iters times, then change single blocks."""
    sites: tl.constexpr = side * side
    run = tl.program_id(0)
    part = run % parts
    unary_ptr += part * (num * sites)
    compat_ptr += part * (num * num)
    real_ptr += part * num
    start_ptr += run.to(tl.int64) * (num * sites)
    shown_ptr += run.to(tl.int64) * (num * sites)
    site = tl.arange(0, S)
    label = tl.arange(0, L)
    output = tl.arange(0, N)
    adjacent = _adjacent(site, tl.arange(0, S), side)
    is_real = tl.load(real_ptr + label, mask=label < num, other=0) != 0
    inside = (site < sites)[:, None] & is_real[None, :]
    cost = tl.load(
        unary_ptr + label[None, :] * sites + site[:, None], mask=inside, other=COST_OF_NONE
    )
    total = tl.zeros([L], tl.float32)
    for j in range(num):
        chosen = tl.load(start_ptr + j * sites + site, mask=site < sites, other=0)
        bits = _bit(chosen.to(tl.int32))
        tl.store(shown_ptr + j * sites + site, bits, mask=site < sites)
        total += _counts(bits, site, label, sites) * tl.load(real_ptr + j)
    tl.debug_barrier()  # threads read what others have written
    sets = tl.zeros([N], tl.int32)
    fewest = 1e9  # blocks an input needs for half labels; unreachable in the first iteration
    for iteration in range(num_iters):
        if iteration == tie_iter:
            sets = _shown_sets(shown_ptr, site, label, output, num, sites, N)
        for j in range(num):
            bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=1)
            own = _counts(bits, site, label, sites)
            weight = tl.load(real_ptr + j)
            total -= own * weight
            v = _times_compat(total, compat_ptr, label, num, L)
            dear = _push(sets, output, label, j) + 2 * _excess(v, tau, SOFT)
            bits = _cut(
                cost + gamma * dear[None, :], bits, own, adjacent, beta, num_sweeps, fewest, site,
                label, num, side, HALVES,
            )  # fmt: skip
            total += _counts(bits, site, label, sites) * weight
            tl.debug_barrier()  # the store overwrites what others read
            tl.store(shown_ptr + j * sites + site, bits, mask=site < sites)
            tl.debug_barrier()
        fewest = 0.25
    _descend(
        shown_ptr, compat_ptr, real_ptr, cost, sets, total, adjacent, beta, gamma, tau, site, label,
        output, num, side, L, N, SOFT,
    )  # fmt: skip
    value = _objective(
        shown_ptr, compat_ptr, real_ptr, cost, adjacent, beta, gamma, tau, site, label, num, side,
        L, SOFT,
    )  # fmt: skip
    tl.store(value_ptr + run, value)


@triton.jit
def _adjacent(site, other, side: tl.constexpr):
    """Adjacency of blocks; its fp16 products with shares (0, 1/2, 1) and with S are exact."""
    down = tl.abs((site // side)[:, None] - (other // side)[None, :])
    across = tl.abs((site % side)[:, None] - (other % side)[None, :])
    inside = (site < side * side)[:, None] & (other < side * side)[None, :]
    return tl.where(inside & (down + across == 1), 1.0, 0.0).to(tl.float16)


@triton.jit
def _bit(index):
    return (index * 0 + 1) << index


@triton.jit
def _weights(bits):
    """The share of each input in a block: 1, or 1/2 of two inputs."""
    return tl.where((bits & (bits - 1)) == 0, 1.0, 0.5)


@triton.jit
def _counts(bits, site, label, sites: tl.constexpr):
    """Number of blocks of each input."""
    share = tl.where(site < sites, _weights(bits), 0.0)
    return tl.sum(tl.where(_has(bits, label), share[:, None], 0.0), axis=0)


@triton.jit
def _has(bits, label):
    """The inputs of each block; there can be more labels than the 32 bits."""
    return (((bits[:, None] >> (label & 31)[None, :]) & 1) != 0) & (label < 32)[None, :]


@triton.jit
def _times_compat(counts, compat_ptr, label, num: tl.constexpr, L: tl.constexpr):
    """counts A."""
    row = tl.arange(0, L)
    inside = (row < num)[:, None] & (label < num)[None, :]
    A = tl.load(compat_ptr + row[:, None] * num + label[None, :], mask=inside, other=0.0)
    return tl.sum(counts[:, None] * A, axis=0)


@triton.jit
def _excess(v, tau, SOFT: tl.constexpr):
    """v [v > tau], or max(v - tau, 0)."""
    return tl.maximum(v - tau, 0.0) if SOFT else tl.where(v > tau, v, 0.0)


@triton.jit
def _shown_sets(shown_ptr, site, label, output, num: tl.constexpr, sites: tl.constexpr,
                N: tl.constexpr):  # fmt: skip
    """The inputs of each output, as bits."""
    sets = tl.zeros([N], tl.int32)
    for j in range(num):
        bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=0)
        is_used = (_counts(bits, site, label, sites) > 0) & (label < 32)
        used = tl.sum(tl.where(is_used, _bit(label & 31), 0), axis=0)
        sets = tl.where(output == j, used, sets)
    return sets


@triton.jit
def _push(sets, output, label, j):
    """The tie penalty: 1 on the first or second input of a set that several outputs show."""
    own = tl.sum(tl.where(output == j, sets, 0), axis=0)
    rest = own & (own - 1)
    is_same = (sets == own) & (rest != 0)
    later = tl.max((is_same & (output > j)).to(tl.float32), axis=0)
    earlier = tl.max((is_same & (output < j)).to(tl.float32), axis=0)
    bit = tl.where(label < 32, _bit(label & 31), 0)
    is_first = (bit & own & -own) != 0
    is_second = (bit & rest & -rest) != 0
    return tl.where(is_first, later, 0.0) + tl.where(is_second, earlier, 0.0)


@triton.jit
def _cut(
    plain, bits, own, adjacent, beta, num_sweeps, fewest, site, label, num: tl.constexpr,
    side: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Red-black conditional modes of one output over its labels."""
    bit = tl.where(label < num, _bit(label & 31), 0)
    costs = plain
    if HALVES:
        # Counts are multiples of 1/2; the small slope breaks ties.
        rank = tl.where(label < num, own - (0.2 / num) * label.to(tl.float32), -1e9)
        first = tl.argmax(rank, axis=0)
        rank = tl.where(label == first, -1e9, rank)
        second_count = tl.max(rank, axis=0)
        second = tl.argmax(rank, axis=0)
        rank = tl.where(label == second, -1e9, rank)
        third_count = tl.max(rank, axis=0)
        third = tl.argmax(rank, axis=0)
        a = _column(plain, label, first)
        b = _column(plain, label, second)
        c = _column(plain, label, third)
        two = tl.where(second_count > fewest, -BONUS, COST_OF_NONE)
        three = tl.where(third_count > fewest, -BONUS, COST_OF_NONE)
        costs = tl.where((label == num)[None, :], (0.5 * a + 0.5 * b + two)[:, None], costs)
        costs = tl.where((label == num + 1)[None, :], (0.5 * a + 0.5 * c + three)[:, None], costs)
        costs = tl.where((label == num + 2)[None, :], (0.5 * b + 0.5 * c + three)[:, None], costs)
        ab = tl.where(second_count > fewest, _bit(first) | _bit(second), 0)
        ac = tl.where(third_count > fewest, _bit(first) | _bit(third), 0)
        bc = tl.where(third_count > fewest, _bit(second) | _bit(third), 0)
        bit = tl.where(label == num, ab, bit)
        bit = tl.where(label == num + 1, ac, bit)
        bit = tl.where(label == num + 2, bc, bit)
        # A half label that is no longer available becomes its first input.
        is_there = (bits & (bits - 1)) == 0
        is_there = is_there | (bits == ab) | (bits == ac) | (bits == bc)
        bits = tl.where(is_there, bits, bits & -bits)
    is_odd = (site // side + site % side) % 2
    for _ in range(num_sweeps):
        for color in tl.static_range(2):
            pull = tl.dot(adjacent, _alike(bits, bit).to(tl.float16))
            best = tl.argmin(costs - beta * pull, axis=1)
            chosen = tl.sum(tl.where(label[None, :] == best[:, None], bit[None, :], 0), axis=1)
            bits = tl.where(is_odd == color, chosen, bits)
    return bits


@triton.jit
def _column(tile, label, index):
    return tl.sum(tl.where((label == index)[None, :], tile, 0.0), axis=1)


@triton.jit
def _alike(bits, bit):
    """S of each block and label: 1 if equal, 0.75 if they share an input."""
    alike = tl.where((bits[:, None] & bit[None, :]) != 0, LIKENESS, 0.0)
    return tl.where(bits[:, None] == bit[None, :], 1.0, alike)


@triton.jit
def _shares(bits, label):
    return tl.where(_has(bits, label), _weights(bits)[:, None], 0.0)


@triton.jit
def _degree(site, side: tl.constexpr):
    row = site // side
    col = site % side
    return (
        (row > 0).to(tl.float32)
        + (row < side - 1).to(tl.float32)
        + (col > 0).to(tl.float32)
        + (col < side - 1).to(tl.float32)
    )


@triton.jit
def _row(tile, output, j):
    return tl.sum(tl.where((output == j)[:, None], tile, 0.0), axis=0)


@triton.jit
def _descend(
    shown_ptr, compat_ptr, real_ptr, cost, sets, total, adjacent, beta, gamma, tau, site, label,
    output, num: tl.constexpr, side: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """In each output in turn, make the change of one block that lowers F most, if any does."""
    sites: tl.constexpr = side * side
    shown = tl.zeros([N, L], tl.float32)
    v = tl.zeros([N, L], tl.float32)
    for j in range(num):
        bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=0)
        own = _counts(bits, site, label, sites) * tl.load(real_ptr + j)
        elsewhere = _times_compat(total - own, compat_ptr, label, num, L)
        shown = tl.where((output == j)[:, None], own[None, :], shown)
        v = tl.where((output == j)[:, None], elsewhere[None, :], v)
    itself = tl.load(compat_ptr + label * (num + 1), mask=label < num, other=0.0)
    degree = (0.5 * beta) * _degree(site, side)
    for j in range(num):
        others = tl.where((output == j)[:, None], 0.0, shown)
        now = _excess(v, tau, SOFT)
        more = tl.sum(others * (_excess(v + itself[None, :], tau, SOFT) - now), axis=0)
        less = tl.sum(others * (_excess(v - itself[None, :], tau, SOFT) - now), axis=0)
        half_less = tl.sum(others * (_excess(v - 0.5 * itself[None, :], tau, SOFT) - now), axis=0)
        bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=0)
        near = tl.dot(adjacent, _shares(bits, label).to(tl.float16))
        dear = gamma * (_push(sets, output, label, j) + _row(now, output, j))
        base = cost + dear[None, :] - beta * near
        share = _weights(bits)
        has = _has(bits, label)
        freed = tl.where((share < 1)[:, None], 2 * half_less[None, :], less[None, :])
        left = share[:, None] * (base - gamma * freed + (degree * share)[:, None])
        left = tl.sum(tl.where(has, left, 0.0), axis=1)
        change = base + gamma * more[None, :] + (degree - left)[:, None]
        is_real = tl.load(real_ptr + label, mask=label < num, other=0) != 0
        is_out = has | (is_real == 0)[None, :] | (site >= sites)[:, None]
        change = tl.where(is_out, COST_OF_NONE, change)
        best = tl.argmin(change, axis=1)
        gain = tl.min(change, axis=1)
        place = tl.argmin(gain, axis=0)
        chosen = tl.sum(tl.where(site == place, best, 0), axis=0)
        is_worth = (tl.min(gain, axis=0) < -LEAST_GAIN) & (tl.load(real_ptr + j) != 0)
        new = tl.where(site == tl.where(is_worth, place, -1), _bit(chosen), bits)
        moved = _counts(new, site, label, sites) - _counts(bits, site, label, sites)
        shift = _times_compat(moved, compat_ptr, label, num, L)
        v = tl.where((output == j)[:, None], v, v + shift[None, :])
        shown = tl.where((output == j)[:, None], shown + moved[None, :], shown)
        tl.debug_barrier()  # the store overwrites what others read
        tl.store(shown_ptr + j * sites + site, new, mask=site < sites)
    tl.debug_barrier()


@triton.jit
def _objective(
    shown_ptr, compat_ptr, real_ptr, cost, adjacent, beta, gamma, tau, site, label,
    num: tl.constexpr, side: tl.constexpr, L: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """F of the part."""
    sites: tl.constexpr = side * side
    total = tl.zeros([L], tl.float32)
    for j in range(num):
        bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=0)
        total += _counts(bits, site, label, sites) * tl.load(real_ptr + j)
    value = 0.0
    degree = _degree(site, side)
    for j in range(num):
        weight = tl.load(real_ptr + j)
        bits = tl.load(shown_ptr + j * sites + site, mask=site < sites, other=0)
        own = _counts(bits, site, label, sites) * weight
        v = _times_compat(total - own, compat_ptr, label, num, L)
        near = tl.dot(adjacent, _shares(bits, label).to(tl.float16))
        share = _weights(bits)[:, None]
        has = _has(bits, label) & (site < sites)[:, None]
        # Each edge is counted from both ends: |z_u - z_v|^2 = (|z_u|^2 - z_u z_v) + the same of v.
        edges = (0.5 * beta) * (degree[:, None] * share - near)
        blocks = tl.sum(tl.where(has, share * (cost + edges), 0.0), axis=1)
        crowding = gamma * tl.sum(own * _excess(v, tau, SOFT), axis=0)
        value += tl.where(weight != 0, tl.sum(blocks, axis=0) + crowding, 0.0)
    return value


@triton.jit(do_not_specialize=["restarts", "parts"])
def _shares_kernel(
    shown_ptr, value_ptr, real_ptr, shares_ptr, restarts, parts, num: tl.constexpr,
    sites: tl.constexpr, S: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The shares of one output in the restart of least F."""
    part = tl.program_id(0)
    j = tl.program_id(1)
    restart = tl.arange(0, R)
    values = tl.load(
        value_ptr + restart * parts + part, mask=restart < restarts, other=float("inf")
    )
    best = tl.argmin(values, axis=0)
    site = tl.arange(0, S)
    label = tl.arange(0, L)
    base = ((best * parts + part).to(tl.int64) * num + j) * sites
    bits = tl.load(shown_ptr + base + site, mask=site < sites, other=0)
    shares = _shares(bits, label) * tl.load(real_ptr + part * num + j)
    offsets = ((part * num + j) * sites + site[:, None]) * num + label[None, :]
    tl.store(shares_ptr + offsets, shares, mask=(site < sites)[:, None] & (label < num)[None, :])
