"""Figures of evaluations, drawn from numbers: reliability diagrams and localised objects.

matplotlib is imported when a figure is drawn, and draws without a screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LocalizedPicture", "ReliabilityPanel", "localization_grid", "reliability_diagrams"]

Box = tuple[float, float, float, float]

# Colours that stay apart for colour-blind readers; boxes as the paper draws them, red and green.
BLUE, ORANGE, RED, GREEN = "#0072b2", "#d55e00", "#ff2020", "#20e020"


@dataclass(frozen=True)
class ReliabilityPanel:
    """One diagram: of each bin its count and its mean confidence and accuracy, all in [0, 1].

    ``note`` stands below the title: the figures that sum it up.
    """

    title: str
    edges: Sequence[float]
    counts: Sequence[int]
    confidence: Sequence[float]
    accuracy: Sequence[float]
    note: str = ""


@dataclass(frozen=True)
class LocalizedPicture:
    """An image [h, w, 3] in [0, 1], the map over it [h, w] in [0, 1], and both kinds of boxes.

    Boxes are (x0, y0, x1, y1), ends exclusive; ``box`` is None where nothing was found.
    """

    image: NDArray[np.floating[Any]]
    heat: NDArray[np.floating[Any]]
    box: Box | None
    true_boxes: Sequence[Box]
    iou: float
    caption: str


def reliability_diagrams(panels: Sequence[ReliabilityPanel], title: str) -> Figure:
    """One column a panel: accuracy by confidence above, the counts of the bins below.

    The bar of a bin is its accuracy; what lies between it and the bin's mean confidence is hatched,
    in orange where the network is too sure of itself, in blue where it is not sure enough.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = _figure(max(4.6, 4.4 * len(panels)), 6.2)
    # Each with counts of its own: what is held out for a temperature is missing from its panel.
    grid = figure.subplots(2, len(panels), squeeze=False, sharex=True, height_ratios=(2.4, 1))
    for column, panel in enumerate(panels):
        _draw_reliability(grid[0, column], panel)
        _draw_counts(grid[1, column], panel)
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("images")
    dot = Line2D([], [], color="black", marker="o", markersize=3.2, linestyle="none")
    bars = [
        Patch(facecolor="0.8", edgecolor="0.35", label="accuracy"),
        Patch(facecolor=ORANGE, alpha=0.45, hatch="///", label="too confident by"),
        Patch(facecolor=BLUE, alpha=0.45, hatch="///", label="not confident enough by"),
    ]
    dot.set_label("mean confidence and accuracy of a bin")
    figure.legend(handles=[*bars, dot], loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_reliability(axes: Any, panel: ReliabilityPanel) -> None:
    edges = np.asarray(panel.edges)
    axes.plot([0, 1], [0, 1], color="0.4", linewidth=0.9, linestyle="--")
    for left, right, count, confidence, accuracy in zip(
        edges[:-1], edges[1:], panel.counts, panel.confidence, panel.accuracy, strict=True
    ):
        if not count:
            continue
        width = right - left
        axes.bar(left, accuracy, width, align="edge", color="0.8", edgecolor="0.35", linewidth=0.7)
        colour = ORANGE if confidence > accuracy else BLUE
        axes.bar(
            left,
            confidence - accuracy,
            width,
            bottom=accuracy,
            align="edge",
            color=colour,
            alpha=0.45,
            hatch="///",
            edgecolor=colour,
            linewidth=0.0,
        )
        # Where in the bin its confidences lie, on average.
        axes.plot(confidence, accuracy, marker="o", markersize=3.2, color="black")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(f"{panel.title}\n{panel.note}".strip(), fontsize=9)
    axes.grid(alpha=0.25)


def _draw_counts(axes: Any, panel: ReliabilityPanel) -> None:
    edges, counts = np.asarray(panel.edges), np.asarray(panel.counts)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color="0.8", edgecolor="0.35")
    top = max(1, int(counts.max()))
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        axes.text(
            (left + right) / 2, count + 0.03 * top, str(count), fontsize=6, ha="center", rotation=90
        )
    axes.set(xlim=(0, 1), ylim=(0, 1.35 * top), xlabel="confidence")


def localization_grid(
    pictures: Sequence[LocalizedPicture], title: str, note: str = "", columns: int = 4
) -> Figure:
    """Two pictures an image: as it is, and under its map; the boxes on both, the IoU above."""
    columns = min(columns, len(pictures))
    num_rows = -(-len(pictures) // columns)
    figure = _figure(2.9 * columns, 1.95 * num_rows + 0.6)
    grid = figure.subplots(num_rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, picture in zip(grid.flat, pictures, strict=False):
        _draw_localized(axes, picture)
    figure.suptitle(title, fontsize=11)
    if note:
        figure.supxlabel(note, fontsize=8)
    return figure


def _draw_localized(axes: Any, picture: LocalizedPicture) -> None:
    from matplotlib import colormaps

    height, width = picture.image.shape[:2]
    gap = max(1, width // 16)
    canvas = np.ones((height, 2 * width + gap, 3))
    colours = colormaps["jet"](np.clip(picture.heat, 0, 1))[..., :3]
    canvas[:, :width] = picture.image
    canvas[:, width + gap :] = 0.5 * picture.image + 0.5 * colours
    axes.imshow(np.clip(canvas, 0, 1), interpolation="nearest")
    for shift in (0, width + gap):
        for box in picture.true_boxes:
            _draw_box(axes, box, GREEN, shift)
        if picture.box is not None:
            _draw_box(axes, picture.box, RED, shift)
    found = f"IoU {picture.iou:.2f}" if picture.box is not None else "nothing found"
    axes.set_title(f"{picture.caption}\n{found}", fontsize=8)


def _draw_box(axes: Any, box: Box, colour: str, shift: float) -> None:
    from matplotlib.patches import Rectangle

    x0, y0, x1, y1 = box
    # A pixel is drawn around its number: the first begins half a pixel before.
    axes.add_patch(
        Rectangle(
            (x0 + shift - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, edgecolor=colour, lw=1.4
        )
    )


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
