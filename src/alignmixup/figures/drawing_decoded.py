"""Figures of decoded features: interpolations between two images, and what becomes of their pose.

Only arrays come in, as in ``figures``, whose colours and habits these share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alignmixup.figures.drawing import BLUE, GREEN, PURPLE, RED, Image, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Interpolation", "Way", "interpolation_grid", "pose_ways"]

COLOURS = {"aligned": PURPLE, "unaligned": BLUE, "oracle": GREEN, "random": RED, "uniform": "0.5"}


@dataclass(frozen=True)
class Interpolation:
    """Two images and decoded mixes of their features, one for each share of the first image.

    ``keep_first`` has mixes [k, h, w, 3] on the first image's positions, by the name of their row
    (unaligned, aligned); ``keep_second`` those on the second's.
    """

    first: Image
    second: Image
    shares: tuple[float, ...]
    keep_first: Mapping[str, Image]
    keep_second: Mapping[str, Image]


@dataclass(frozen=True)
class Way:
    """How appearance and pose go together on the way from one image to the other, by plan."""

    plan: str
    kept_shares: tuple[float, ...]
    appearance: tuple[float, ...]
    pose: tuple[float, ...]


def interpolation_grid(pairs: Sequence[Interpolation], title: str, note: str = "") -> Figure:
    """A block a pair: the two images, then mixes that keep the first's positions and the second's.

    The rows of a block are those of the mappings, in their order. All pictures lie in one pair of
    axes, a picture one unit wide, so that no label moves them.
    """
    k, rows = len(pairs[0].shares), list(pairs[0].keep_first)
    step, block = 1.08, len(rows) * 1.08 + 0.3
    starts = (2 * step + 0.5, 2 * step + 0.5 + k * step + 0.35)
    width, height = starts[1] + k * step, len(pairs) * block
    figure = new_figure(0.62 * width, 0.62 * height + 1.2)
    axes = figure.subplots()
    for number, pair in enumerate(pairs):
        top = number * block
        middle = top + (len(rows) - 1) * step / 2
        _place(axes, pair.first, 0, middle, "$x$")
        _place(axes, pair.second, step, middle, "$x'$")
        for start, mixes in zip(starts, (pair.keep_first, pair.keep_second), strict=True):
            for row, name in enumerate(rows):
                for column, (share, image) in enumerate(zip(pair.shares, mixes[name], strict=True)):
                    label = f"{share:g}" if number == row == 0 else ""
                    _place(axes, image, start + column * step, top + row * step, label)
        for row, name in enumerate(rows):
            at = starts[0] - 0.06, top + row * step + 0.5
            axes.text(*at, name, rotation=90, ha="right", va="center", fontsize=7)
    for start, kept in zip(starts, ("x", "x'"), strict=True):
        heading = rf"positions of ${kept}$ kept, $\lambda$ ="
        axes.text(start + k * step / 2, -0.5, heading, ha="center", fontsize=9)
    axes.set(xlim=(-0.05, width), ylim=(height, -0.9), aspect="equal")
    axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    if note:
        figure.supxlabel(note, fontsize=8)
    return figure


def _place(axes: Any, image: Image, left: float, top: float, label: str) -> None:
    """One picture, a unit wide, with its label above it."""
    extent = (left, left + 1, top + 1, top)
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest", extent=extent)
    if label:
        axes.text(left + 0.5, top - 0.08, label, ha="center", va="bottom", fontsize=8)


def pose_ways(
    ways: Sequence[Way], examples: Mapping[str, Sequence[Image]], title: str, note: str = ""
) -> Figure:
    """Left, a line a plan through (appearance, pose); right, decoded examples, a column a kind."""
    names = list(examples)
    count = len(examples[names[0]])
    figure = new_figure(5.0 + 0.95 * len(names), 5.2)
    halves: Any = figure.subfigures(1, 2, width_ratios=(5.0, 0.95 * len(names)))
    axes = halves[0].subplots()
    for way in ways:
        colour = COLOURS.get(way.plan, "black")
        axes.plot(way.appearance, way.pose, marker="o", markersize=4, color=colour, label=way.plan)
        axes.plot(way.appearance[-1:], way.pose[-1:], marker="D", markersize=7, color=colour)
    axes.axhline(0, color="0.7", linewidth=0.8, linestyle="--")
    axes.set_xlabel("appearance: 0 the kept image's, 1 the other's")
    axes.set_ylabel("pose: 1 the kept image's, 0 a stranger's")
    axes.set_title("diamonds: nothing of the kept features is left", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")
    grid = halves[1].subplots(count, len(names), squeeze=False)
    for column, name in enumerate(names):
        for row, image in enumerate(examples[name]):
            _show(grid[row, column], image, name if row == 0 else "")
    figure.suptitle(title, fontsize=10)
    if note:
        figure.supxlabel(note, fontsize=8)
    return figure


def _show(axes: Any, image: Image, title: str) -> None:
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest")
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=8)
