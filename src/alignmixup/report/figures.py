"""Figures drawn from numbers: no model, no data set, only arrays come in.

matplotlib is imported when a figure is drawn, and draws without a screen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AlignedPair", "aligned_pairs", "save", "training_curves"]

Image = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class AlignedPair:
    """Two images, the assignment between their positions, and feature maps to show beside them.

    ``assignment`` is r P: row i says how position i of the first image is spread over the second's.
    ``maps`` are pictures of features by their titles.
    """

    first: Image
    second: Image
    assignment: Image
    maps: Mapping[str, Image]


def training_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Test accuracy by epoch, one line a method."""
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    for name, points in curves.items():
        epochs, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(epochs, values, marker="o", markersize=3, label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test top-1 (%)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def aligned_pairs(pairs: Sequence[AlignedPair], title: str) -> Figure:
    """One row a pair: the images with their correspondences as lines, then the feature maps.

    Each position of the first image is joined to the one it is assigned to most, in its own colour;
    a faint line is a spread assignment.
    """
    titles = list(pairs[0].maps)
    figure = _figure(3.6 + 1.5 * len(titles), 1.9 * len(pairs) + 0.4)
    grid = figure.add_gridspec(len(pairs), 1 + len(titles), width_ratios=[2.3] + [1] * len(titles))
    for row, pair in enumerate(pairs):
        _draw_correspondences(figure.add_subplot(grid[row, 0]), pair)
        for column, name in enumerate(titles, start=1):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(np.clip(pair.maps[name], 0, 1), interpolation="nearest")
            axes.set_axis_off()
            if row == 0:
                axes.set_title(name, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF beside each other and return both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    for file in written:
        figure.savefig(file, dpi=150, bbox_inches="tight")
    return written


def _draw_correspondences(axes: Any, pair: AlignedPair) -> None:
    from matplotlib import colormaps

    height, width = pair.first.shape[:2]
    gap = max(2, width // 4)
    canvas = np.ones((height, 2 * width + gap, 3))
    canvas[:, :width], canvas[:, width + gap :] = pair.first, pair.second
    axes.imshow(np.clip(canvas, 0, 1), interpolation="nearest")
    axes.set_axis_off()
    r = len(pair.assignment)
    side = round(r**0.5)
    if side * side != r:
        raise ValueError(f"correspondences are drawn for square maps, got {r} positions")
    centres = (np.arange(side) + 0.5) * width / side - 0.5
    for i in range(r):
        j = int(pair.assignment[i].argmax())
        colour = colormaps["hsv"](i / r)
        start = centres[i % side], centres[i // side]
        end = centres[j % side] + width + gap, centres[j // side]
        strength = float(np.clip(pair.assignment[i, j], 0.15, 1.0))
        axes.plot(*zip(start, end, strict=True), color=colour, linewidth=1.0, alpha=strength)
        axes.plot(*start, marker="o", markersize=2.5, color=colour)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
