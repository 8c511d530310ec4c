"""Launch settings of the transport kernels beyond 32 positions, by the number of positions.

``SIZE_CLASSES`` decides which kernels run: those of ``triton/sinkhorn_held.py`` or
``triton/sinkhorn_rows.py``, or those of ``triton/sinkhorn_large.py`` for a class that is off,
beyond its sizes, and for a cost with too few columns for the threads of a class.
``benchmarks/large_maps.py`` times candidates for each class on a GPU and prints the fastest.

This module imports no triton: the shape of a plan in a compiled graph depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from alignmixup.ops import backend


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes and warps of one program."""

    rows: int
    inner: int
    channels: int
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class HeldTiling:
    """A program per sample, with all rows in registers; ``lanes`` threads share a row.

    They add its sum by shuffles, or in shared memory if ``shared_sums``.
    """

    num_warps: int
    lanes: int
    shared_sums: bool = False

    @property
    def max_registers(self) -> int:
        """All of an SM for its threads; without it the compiler may choose fewer, and spill."""
        return min(255, 65536 // (32 * self.num_warps))


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the programs of one sample divide its rows.

    ``group`` programs have an equal share of the rows. ``block`` rows are in registers at a time;
    0 keeps all rows of a program in registers during the iterations. ``per_sm`` programs run on one
    SM together and share its registers. ``width`` columns make a slice, see ``triton/tiles.py``.
    """

    group: int
    block: int
    num_warps: int
    num_stages: int = 3
    per_sm: int = 1
    width: int = 128

    @property
    def max_registers(self) -> int:
        """The most registers of a thread with which ``per_sm`` programs are resident together."""
        return min(255, 65536 // (self.per_sm * 32 * self.num_warps))


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Kernels for up to ``max_positions`` positions: cost, iterations, interpolation.

    ``cost_parts`` is the largest number of partial sums of a cost over channels, ``cost`` and
    ``mix`` are tiles for features in half precision.
    """

    max_positions: int
    rows: HeldTiling | RowTiling
    cost: Tiling = Tiling(128, 128, channels=32, num_warps=8)
    cost_parts: int = 1
    mix: Tiling = Tiling(64, 32, channels=128, num_warps=4, num_stages=2)
    is_on: bool = True


# The fastest of benchmarks/h200_large_maps.csv.
SIZE_CLASSES = (
    SizeClass(
        max_positions=64,
        rows=HeldTiling(num_warps=4, lanes=16),
        cost=Tiling(64, 64, channels=64, num_warps=4),
        cost_parts=4,
        mix=Tiling(64, 64, channels=64, num_warps=4, num_stages=2),
    ),
    SizeClass(max_positions=128, rows=HeldTiling(num_warps=8, lanes=16)),
    SizeClass(max_positions=208, rows=HeldTiling(num_warps=8, lanes=32, shared_sums=True)),
    SizeClass(max_positions=256, rows=RowTiling(group=4, block=0, num_warps=4, per_sm=2, width=64)),
    SizeClass(max_positions=1024, rows=RowTiling(group=8, block=4, num_warps=4)),
)
MIN_POSITIONS = 33


def size_class(size: int) -> SizeClass | None:
    """Return the class that runs ``size`` positions, or None if none is on.

    None as well where a cooperative launch is not possible: on ROCm, and with Triton 3.2.
    """
    if backend.NO_COOPERATION:
        return None
    for entry in SIZE_CLASSES:
        if MIN_POSITIONS <= size <= entry.max_positions:
            return entry if entry.is_on else None
    return None


def channel_unit(entry: SizeClass | None, c: int) -> int:
    """Return a divisor of ``c`` that the kernels may use for wider loads.

    Triton itself looks for 16 alone: with 1000 channels it would load one number at a time.
    """
    return math.gcd(c, 16) if entry else 1


def num_parts(entry: SizeClass, n: int, c: int, dtype: torch.dtype) -> int:
    """Return the number of partial sums of a cost over channels, at least 128 channels each.

    A single one becomes the plan; several take at most the memory of the features.
    """
    return max(1, min(entry.cost_parts, c * dtype.itemsize // (4 * n), c // 128))
