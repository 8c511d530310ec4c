"""The toy alignment: two sets of points in the plane, their cost, assignment and interpolations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignmixup.figures.by_name import register_figure
from alignmixup.figures.style import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILLION,
    Figure,
    Image,
    new_figure,
    save,
    write_title,
)
from alignmixup.ops.align import Keep, align_mix
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

NUM_POINTS, EPS, NUM_ITERS = 16, 0.1, 1000
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ToyAlignment:
    """Two sets of r points in the plane, [r, 2] each, and what alignment makes of them.

    ``assignment`` is R = r P; ``aligned_first`` is A~ = R A', the second set carried onto the first
    one's points, and ``aligned_second`` A~' = R' A. For each of ``shares`` (lam, the first set's
    share) ``keep_first`` [k, r, 2] holds lam A + (1 - lam) A~ and ``keep_second`` holds
    lam A~' + (1 - lam) A'.
    """

    first: Image
    second: Image
    cost: Image
    assignment: Image
    aligned_first: Image
    aligned_second: Image
    shares: tuple[float, ...]
    keep_first: Image
    keep_second: Image


@register_figure("toy", about="the alignment of 16 points in the plane")
def toy(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw the toy alignment: cost, assignment, both alignments and the interpolations."""
    if run is not None:
        raise ValueError(f"the figure toy is drawn from points alone: leave out the run {run}")
    title = f"{NUM_POINTS} points in the plane, aligned by optimal transport"
    caption = (
        f"Two sets of {NUM_POINTS} points in the plane, aligned by entropic optimal transport (eps "
        f"= {EPS}, {NUM_ITERS} iterations): cost and assignment (rows A, columns A'; lines: R > "
        "0.1), each set carried onto the other one's points, and the interpolations in both "
        "directions."
    )
    return save(draw_toy(toy_alignment(seed), title), out / "toy", caption)


def toy_alignment(seed: int = 0) -> ToyAlignment:
    """Two sets of 16 points, scattered and apart, and everything that alignment makes of them."""
    rng = torch.Generator().manual_seed(seed)
    points = 0.6 * torch.randn(2, NUM_POINTS, 2, generator=rng, dtype=torch.float64)
    points = points + torch.tensor([[[-0.4, -0.2]], [[0.4, 0.2]]], dtype=torch.float64)
    # From left to right, so that neighbors in a matrix are near each other in the plane.
    A, B = (group[group[:, 0].argsort()] for group in points)
    cost = pairwise_cost(A.T, B.T)
    plan = sinkhorn(cost, eps=EPS, num_iters=NUM_ITERS).plan
    both, swap = torch.stack([A, B]), torch.tensor([1, 0])

    def mixed(lam: float, keep: Keep) -> Tensor:
        share = torch.full((2,), lam, dtype=torch.float64)
        return align_mix(both, swap, share, keep=keep, eps=EPS, num_iters=NUM_ITERS)[0]

    return ToyAlignment(
        first=A.numpy(),
        second=B.numpy(),
        cost=cost.numpy(),
        assignment=(NUM_POINTS * plan).numpy(),
        # The far ends: nothing of the kept set is left in them.
        aligned_first=mixed(0.0, "anchor").numpy(),
        aligned_second=mixed(1.0, "partner").numpy(),
        shares=SHARES,
        keep_first=torch.stack([mixed(lam, "anchor") for lam in SHARES]).numpy(),
        keep_second=torch.stack([mixed(lam, "partner") for lam in SHARES]).numpy(),
    )


def draw_toy(toy: ToyAlignment, title: str) -> Figure:
    """Points, cost, assignment and both alignments; below, the interpolations in each direction."""
    r, columns = len(toy.first), max(5, len(toy.shares))
    figure = new_figure(2.5 * columns, 8.4)
    grid = figure.subplots(3, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    plain = {"A": (toy.first, BLUE, "o"), "A'": (toy.second, VERMILLION, "s")}
    _draw_points(grid[0, 0], plain, "two sets of points", toy)
    for i, j in zip(*np.nonzero(toy.assignment > 0.1), strict=True):
        width = 1.6 * float(toy.assignment[i, j])
        _draw_moves(grid[0, 0], toy.first[i : i + 1], toy.second[j : j + 1], width)
    _draw_matrix(figure, grid[0, 1], toy.cost, "cost M", "viridis")
    _draw_matrix(figure, grid[0, 2], toy.assignment, f"assignment R = {r} P", "magma")
    _draw_points(grid[0, 3], {"": (toy.aligned_first, PURPLE, "^")}, r"$\tilde{A} = R A'$", toy)
    _draw_moves(grid[0, 3], toy.first, toy.aligned_first)
    _draw_points(grid[0, 4], {"": (toy.aligned_second, GREEN, "v")}, r"$\tilde{A}' = R^T A$", toy)
    _draw_moves(grid[0, 4], toy.second, toy.aligned_second)
    rows = (
        (toy.keep_first, PURPLE, "^", r"$\lambda A + (1 - \lambda) \tilde{A}$"),
        (toy.keep_second, GREEN, "v", r"$\lambda \tilde{A}' + (1 - \lambda) A'$"),
    )
    for row, (mixes, color, marker, formula) in enumerate(rows, start=1):
        for column, (share, mix) in enumerate(zip(toy.shares, mixes, strict=True)):
            name = rf"{formula}, $\lambda$ = {share:g}"
            _draw_points(grid[row, column], {"mix": (mix, color, marker)}, name, toy)
    return write_title(figure, title)


def _draw_points(
    axes: Any, points: Mapping[str, tuple[Image, str, str]], title: str, toy: ToyAlignment
) -> None:
    """Points over the two sets, which stay pale in the background; the same limits everywhere."""
    axes.set_axis_on()
    axes.scatter(*toy.first.T, s=16, color=BLUE, alpha=0.3, linewidths=0)
    axes.scatter(*toy.second.T, s=16, color=VERMILLION, alpha=0.3, marker="s", linewidths=0)
    for name, (positions, color, marker) in points.items():
        axes.scatter(*positions.T, s=22, color=color, marker=marker, label=name)
    both = np.concatenate([toy.first, toy.second])
    low, high = both.min(0) - 0.25, both.max(0) + 0.25
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="0.7")
    axes.set_title(title, fontsize="small")
    if len(points) > 1:
        axes.legend(loc="best", handletextpad=0.2)


def _draw_moves(axes: Any, start: Image, end: Image, width: float = 0.7) -> None:
    for pair in np.stack([start, end], axis=1):
        axes.plot(*pair.T, color="0.5", linewidth=width, zorder=0)


def _draw_matrix(figure: Figure, axes: Any, matrix: Image, title: str, colors: str) -> None:
    axes.set_axis_on()
    shown = axes.imshow(matrix, cmap=colors, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize="small")
    # Below, so that all columns of the figure stay equally wide.
    bar = figure.colorbar(shown, ax=axes, location="bottom", fraction=0.06, pad=0.02)
    bar.ax.tick_params(labelsize="x-small")
