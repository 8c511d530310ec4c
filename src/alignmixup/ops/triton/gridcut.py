# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The ordered grid cut in one launch: one program per grid, all candidates in parallel.

The algorithm and symbols are those of ``ops/gridcut.py``. The labels of a candidate are floats in
registers; neighbors read them from a few kilobytes of memory that stay in the cache. Edges beyond
the grid have weight zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignmixup.ops.gridcut import OVERRELAXATION

# Candidates times sites in registers at a time: 16 per thread.
TILE = 4096


def cut(
    unary: Tensor,
    down: Tensor,
    right: Tensor,
    num_relaxations: int,
    num_sweeps: int,
    num_roundings: int,
) -> tuple[Tensor, Tensor]:
    """Return labels [b, n, m] and energies [b] of contiguous float32 costs and weights."""
    b, num_labels, n, m = unary.shape
    labels = torch.empty(b, n, m, dtype=torch.int64, device=unary.device)
    energy = torch.empty(b, dtype=unary.dtype, device=unary.device)
    S = max(32, int(triton.next_power_of_2(n * m)))
    num_starts = 1 + num_labels + num_roundings
    K = min(int(triton.next_power_of_2(num_starts)), TILE // S)
    seen = unary.new_empty(b, K, S)
    _cut_kernel[(b,)](
        unary, down, right, labels, energy, seen, num_relaxations, num_sweeps, num_starts,
        num_roundings, n=n, m=m, top=num_labels - 1, S=S, K=K, OMEGA=OVERRELAXATION,
        num_warps=max(1, min(8, S * K // 512)),
    )  # fmt: skip
    return labels, energy


@triton.jit(do_not_specialize=["num_relaxations", "num_sweeps", "num_starts", "num_roundings"])
def _cut_kernel(
    unary_ptr, down_ptr, right_ptr, labels_ptr, energy_ptr, seen_ptr, num_relaxations, num_sweeps,
    num_starts, num_roundings, n: tl.constexpr, m: tl.constexpr, top: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, OMEGA: tl.constexpr,
):  # fmt: skip
    """argmin_z sum_i U_i(z_i) + sum_ij w_ij (z_i - z_j)^2 / top^2 over the candidates."""
    grid = tl.program_id(0).to(tl.int64)
    unary_ptr += grid * ((top + 1) * n * m)
    down_ptr += grid * ((n - 1) * m)
    right_ptr += grid * (n * (m - 1))
    seen_ptr += grid * (K * S)
    site = tl.arange(0, S)
    row = site // m
    col = site % m
    is_site = site < n * m
    is_odd = (row + col) % 2
    up = tl.load(down_ptr + site - m, mask=is_site & (row > 0), other=0.0)
    down = tl.load(down_ptr + site, mask=row < n - 1, other=0.0)
    edge = right_ptr + row * (m - 1) + col
    left = tl.load(edge - 1, mask=is_site & (col > 0), other=0.0)
    right = tl.load(edge, mask=is_site & (col < m - 1), other=0.0)
    relaxed = _relax(
        unary_ptr, seen_ptr, up, down, left, right, site, is_site, is_odd, num_relaxations, n, m,
        top, S, OMEGA,
    )  # fmt: skip
    alone = _cheapest(unary_ptr, site, is_site, n, m, top, S)
    best_energy = float("inf")
    best = tl.zeros([S], tl.float32)
    for first in range(0, num_starts, K):
        k = first + tl.arange(0, K)
        threshold = (k.to(tl.float32) - (top + 1.5)) / num_roundings
        z = tl.floor(relaxed[None, :] + threshold[:, None])
        z = tl.minimum(tl.maximum(z, 0.0), top)
        z = tl.where((k <= top + 1)[:, None], (k - 1).to(tl.float32)[:, None], z)
        z = tl.where((k == 0)[:, None], alone[None, :], z)
        for _ in range(num_sweeps):
            for color in tl.static_range(2):
                better = _conditional_modes(
                    unary_ptr, seen_ptr, up, down, left, right, z, site, is_site, n, m, top, S, K
                )
                z = tl.where((is_odd == color)[None, :], better, z)
        energies = _energies(unary_ptr, seen_ptr, down, right, z, site, is_site, n, m, top, S, K)
        energies = tl.where(k < num_starts, energies, float("inf"))
        least = tl.min(energies, axis=0)
        # The first on ties.
        choice = tl.min(tl.where(energies == least, k, num_starts), axis=0)
        labels = tl.sum(tl.where((k == choice)[:, None], z, 0.0), axis=0)
        best = tl.where(least < best_energy, labels, best)
        best_energy = tl.minimum(least, best_energy)
    tl.store(labels_ptr + grid * (n * m) + site, best.to(tl.int64), mask=is_site)
    tl.store(energy_ptr + grid, best_energy)


@triton.jit
def _relax(
    unary_ptr, seen_ptr, up, down, left, right, site, is_site, is_odd, num_relaxations,
    n: tl.constexpr, m: tl.constexpr, top: tl.constexpr, S: tl.constexpr, OMEGA: tl.constexpr,
):  # fmt: skip
    """Projected over-relaxation of a z + c z^2 plus the edges, alternating red and black."""
    low = tl.load(unary_ptr + site, mask=is_site, other=0.0)
    high = tl.load(unary_ptr + top * (n * m) + site, mask=is_site, other=0.0)
    curve = tl.zeros([S], tl.float32)
    if top > 1:
        # The mean second difference depends on the first and last differences only.
        second = tl.load(unary_ptr + n * m + site, mask=is_site, other=0.0)
        before = tl.load(unary_ptr + (top - 1) * (n * m) + site, mask=is_site, other=0.0)
        curve = tl.maximum((high - before - second + low) / (2 * (top - 1)), 0.0)
    slope = (high - low) / top - top * curve
    scale = 2.0 / (top * top)
    total = up + down + left + right
    gain = OMEGA / tl.maximum(2 * curve + scale * total, 1e-37)
    z = tl.full([S], top / 2, tl.float32)
    for _ in range(num_relaxations):
        for color in tl.static_range(2):
            pull = _pull(z[None, :], seen_ptr, up, down, left, right, site, m, S, 1)
            moved = (1 - OMEGA) * z + gain * (scale * tl.reshape(pull, (S,)) - slope)
            moved = tl.minimum(tl.maximum(moved, 0.0), top)
            z = tl.where(is_odd == color, moved, z)
    return z


@triton.jit
def _pull(
    z, seen_ptr, up, down, left, right, site, m: tl.constexpr, S: tl.constexpr, K: tl.constexpr
):
    """sum_j w_ij z_j for each candidate."""
    at = _show(z, seen_ptr, S, K)
    pull = up[None, :] * tl.load(at + tl.maximum(site - m, 0)[None, :])
    pull += down[None, :] * tl.load(at + tl.minimum(site + m, S - 1)[None, :])
    pull += left[None, :] * tl.load(at + tl.maximum(site - 1, 0)[None, :])
    pull += right[None, :] * tl.load(at + tl.minimum(site + 1, S - 1)[None, :])
    tl.debug_barrier()  # the next step overwrites what others read
    return pull


@triton.jit
def _show(z, seen_ptr, S: tl.constexpr, K: tl.constexpr):
    """Store the labels for other threads; return the pointers to those of each candidate."""
    at = seen_ptr + tl.arange(0, K)[:, None] * S
    tl.store(at + tl.arange(0, S)[None, :], z)
    tl.debug_barrier()
    return at


@triton.jit
def _cheapest(
    unary_ptr, site, is_site, n: tl.constexpr, m: tl.constexpr, top: tl.constexpr, S: tl.constexpr
):
    """The label of the least unary cost."""
    least = tl.full([S], float("inf"), tl.float32)
    label = tl.zeros([S], tl.float32)
    for level in tl.static_range(top + 1):
        cost = tl.load(unary_ptr + level * (n * m) + site, mask=is_site, other=0.0)
        label = tl.where(cost < least, level, label)
        least = tl.minimum(cost, least)
    return label


@triton.jit
def _conditional_modes(
    unary_ptr, seen_ptr, up, down, left, right, z, site, is_site, n: tl.constexpr,
    m: tl.constexpr, top: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The best label of each site, given its neighbors."""
    # w (l - z_j)^2 = w l^2 - 2 w l z_j + const.
    pull = _pull(z, seen_ptr, up, down, left, right, site, m, S, K) * (-2.0 / (top * top))
    total = (up + down + left + right) / (top * top)
    least = tl.full([K, S], float("inf"), tl.float32)
    best = tl.zeros([K, S], tl.float32)
    for level in tl.static_range(top + 1):
        own = tl.load(unary_ptr + level * (n * m) + site, mask=is_site, other=0.0)
        cost = (own + (level * level) * total)[None, :] + level * pull
        best = tl.where(cost < least, level, best)
        least = tl.minimum(cost, least)
    return best


@triton.jit
def _energies(
    unary_ptr, seen_ptr, down, right, z, site, is_site, n: tl.constexpr, m: tl.constexpr,
    top: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """E(z) of each candidate."""
    own = tl.load(
        unary_ptr + z.to(tl.int32) * (n * m) + site[None, :], mask=is_site[None, :], other=0.0
    )
    at = _show(z, seen_ptr, S, K)
    below = tl.load(at + tl.minimum(site + m, S - 1)[None, :]) - z
    beside = tl.load(at + tl.minimum(site + 1, S - 1)[None, :]) - z
    tl.debug_barrier()
    jumps = down[None, :] * below * below + right[None, :] * beside * beside
    return tl.sum(own + jumps * (1.0 / (top * top)), axis=1)
