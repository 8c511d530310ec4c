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

__all__ = [
    "AlignedPair",
    "LayerEffect",
    "Picture",
    "ToyAlignment",
    "aligned_pairs",
    "effect_by_layer",
    "gallery",
    "new_figure",
    "save",
    "toy_alignment",
    "training_curves",
]

Image = NDArray[np.floating[Any]]

# Colours that stay apart for colour-blind readers.
BLUE, RED, PURPLE, GREEN = "#0072b2", "#d55e00", "#8f4b9c", "#009e73"
PARTS = {"features": BLUE, "pooled": RED, "logits": GREEN}
SMALLEST = 1e-9  # foot of the axis of changes: below what float32 can tell
MOST_LETTERS = 45  # names of layers side by side under a column of a figure


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


@dataclass(frozen=True)
class Picture:
    """One image of a gallery, [h, w, 3] in [0, 1], with its title and what stands below it."""

    title: str
    image: Image
    caption: str


@dataclass(frozen=True)
class LayerEffect:
    """What alignment at one layer changes: features, their mean over positions, logits.

    Each relative to the unaligned mix; ``plan_entropy`` lies between 0 (a one-to-one matching) and
    1 (nothing is matched).
    """

    layer: str
    features: float
    pooled: float
    logits: float
    plan_entropy: float


def training_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Test accuracy by epoch, one line a method."""
    figure = new_figure(6.4, 4.0)
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
    figure = new_figure(3.6 + 1.5 * len(titles), 1.9 * len(pairs) + 0.4)
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


def toy_alignment(toy: ToyAlignment, title: str) -> Figure:
    """Points, cost, assignment and both alignments; below, the interpolations in each direction."""
    r, columns = len(toy.first), max(5, len(toy.shares))
    figure = new_figure(2.5 * columns, 8.4)
    grid = figure.subplots(3, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    plain = {"A": (toy.first, BLUE, "o"), "A'": (toy.second, RED, "s")}
    _draw_points(grid[0, 0], plain, "two sets of points, lines: R > 0.1", toy)
    for i, j in zip(*np.nonzero(toy.assignment > 0.1), strict=True):
        width = 1.6 * float(toy.assignment[i, j])
        _draw_moves(grid[0, 0], toy.first[i : i + 1], toy.second[j : j + 1], width)
    _draw_matrix(figure, grid[0, 1], toy.cost, "cost M (rows A, columns A')", "viridis")
    _draw_matrix(figure, grid[0, 2], toy.assignment, f"assignment R = {r} P", "magma")
    _draw_points(grid[0, 3], {"": (toy.aligned_first, PURPLE, "^")}, r"$\tilde{A} = R A'$", toy)
    _draw_moves(grid[0, 3], toy.first, toy.aligned_first)
    _draw_points(grid[0, 4], {"": (toy.aligned_second, GREEN, "v")}, r"$\tilde{A}' = R^T A$", toy)
    _draw_moves(grid[0, 4], toy.second, toy.aligned_second)
    rows = (
        (toy.keep_first, PURPLE, "^", r"$\lambda A + (1 - \lambda) \tilde{A}$"),
        (toy.keep_second, GREEN, "v", r"$\lambda \tilde{A}' + (1 - \lambda) A'$"),
    )
    for row, (mixes, colour, marker, formula) in enumerate(rows, start=1):
        for column, (share, mix) in enumerate(zip(toy.shares, mixes, strict=True)):
            name = rf"{formula}, $\lambda$ = {share:g}"
            _draw_points(grid[row, column], {"mix": (mix, colour, marker)}, name, toy)
    figure.suptitle(title, fontsize=12)
    return figure


def gallery(pictures: Sequence[Picture], title: str, note: str = "", columns: int = 5) -> Figure:
    """Pictures in rows, each with its title above and its caption below."""
    num_rows = -(-len(pictures) // columns)
    figure = new_figure(2.1 * columns, 2.75 * num_rows + 0.8)
    grid = figure.subplots(num_rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, picture in zip(grid.flat, pictures, strict=False):
        axes.imshow(np.clip(picture.image, 0, 1), interpolation="nearest")
        axes.set_title(picture.title, fontsize=10)
        axes.text(
            0.5, -0.04, picture.caption, fontsize=8, ha="center", va="top", transform=axes.transAxes
        )
    figure.suptitle(title, fontsize=12)
    if note:
        figure.supxlabel(note, fontsize=8)
    return figure


def effect_by_layer(
    networks: Mapping[str, Sequence[LayerEffect]], title: str, threshold: float, note: str = ""
) -> Figure:
    """One column a network: the three changes by layer on a log scale, below the plans' entropy.

    A change below ``threshold`` is next to nothing; a dashed line says where that begins. What is
    zero is drawn at the foot of the axis.
    """
    figure = new_figure(max(6.4, 4.8 * len(networks)), 5.6)
    grid = figure.subplots(2, len(networks), squeeze=False, sharey="row", height_ratios=(2, 1))
    for column, (name, effects) in enumerate(networks.items()):
        where = np.arange(len(effects))
        top, bottom = grid[0, column], grid[1, column]
        for k, (part, colour) in enumerate(PARTS.items()):
            values = [max(getattr(effect, part), SMALLEST) for effect in effects]
            label = "mean over positions" if part == "pooled" else part
            top.bar(where + 0.27 * (k - 1), values, 0.25, color=colour, label=label)
        top.axhline(threshold, color="0.3", linewidth=0.8, linestyle="--")
        top.set_yscale("log")
        top.set_ylim(SMALLEST, 10)
        top.set_title(name, fontsize=10)
        bottom.bar(where, [effect.plan_entropy for effect in effects], 0.5, color="0.5")
        bottom.set_ylim(0, 1)
        for axes in (top, bottom):
            _name_layers(axes, [effect.layer for effect in effects])
            axes.grid(axis="y", alpha=0.3)
    grid[0, 0].set_ylabel("|aligned - unaligned| / |unaligned|")
    grid[1, 0].set_ylabel("plan entropy\n(0 matched, 1 not)")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title + (f"\n{note}" if note else ""), fontsize=11)
    return figure


def _name_layers(axes: Any, layers: Sequence[str]) -> None:
    """Names below the bars, without the module they all lie in, slanted where they would touch."""
    owners = {layer.rpartition(".")[0] for layer in layers}
    if len(owners) == 1:
        layers = [layer.rpartition(".")[2] for layer in layers]
    axes.set_xticks(np.arange(len(layers)), layers)
    if max(map(len, layers), default=0) * len(layers) > MOST_LETTERS:
        for name in axes.get_xticklabels():
            name.set(rotation=20, horizontalalignment="right")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF beside each other and return both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    for file in written:
        figure.savefig(file, dpi=150, bbox_inches="tight")
    return written


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, laid out so that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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
        strength = float(np.clip(pair.assignment[i, j], 0.3, 1.0))
        axes.plot(*zip(start, end, strict=True), color=colour, linewidth=1.0, alpha=strength)
        axes.plot(*start, marker="o", markersize=2.5, color=colour)


def _draw_points(
    axes: Any, points: Mapping[str, tuple[Image, str, str]], title: str, toy: ToyAlignment
) -> None:
    """Points over the two sets, which stay pale in the background; the same limits everywhere."""
    axes.set_axis_on()
    axes.scatter(*toy.first.T, s=16, color=BLUE, alpha=0.3, linewidths=0)
    axes.scatter(*toy.second.T, s=16, color=RED, alpha=0.3, marker="s", linewidths=0)
    for name, (positions, colour, marker) in points.items():
        axes.scatter(*positions.T, s=22, color=colour, marker=marker, label=name)
    both = np.concatenate([toy.first, toy.second])
    low, high = both.min(0) - 0.25, both.max(0) + 0.25
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=9)
    if len(points) > 1:
        axes.legend(fontsize=8, loc="best", handletextpad=0.2)


def _draw_moves(axes: Any, start: Image, end: Image, width: float = 0.7) -> None:
    for pair in np.stack([start, end], axis=1):
        axes.plot(*pair.T, color="0.5", linewidth=width, zorder=0)


def _draw_matrix(figure: Figure, axes: Any, matrix: Image, title: str, colours: str) -> None:
    axes.set_axis_on()
    shown = axes.imshow(matrix, cmap=colours, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=9)
    # Below, so that all columns of the figure stay equally wide.
    bar = figure.colorbar(shown, ax=axes, location="bottom", fraction=0.06, pad=0.02)
    bar.ax.tick_params(labelsize=7)
