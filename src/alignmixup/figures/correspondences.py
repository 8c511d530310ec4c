"""What is matched with what in pairs of images, and their features before and after alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup.contracts import ImageSet
from alignmixup.experiments.painters import features_at
from alignmixup.figures.registry import register_figure
from alignmixup.figures.sources import different_pairs, floats, network_source, shown
from alignmixup.figures.style import Image, new_figure, save, show, write_titles
from alignmixup.ops.align import align_mix, to_positions
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AlignedPair", "aligned_pair", "correspondences", "draw_pairs"]

NUM_PAIRS = 5


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


@register_figure("correspondences", about="what is matched with what in pairs of images")
def correspondences(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw pairs of images with lines between matched positions, and their feature maps."""
    source = network_source(run, seed, data_root)
    pairs = [
        aligned_pair(source.net, source.layer, source.images, i, j, source.eps, source.num_iters)
        for i, j in different_pairs(source.images, NUM_PAIRS, seed)
    ]
    title = f"Correspondences and features at {source.layer} (first three PCA axes): {source.what}"
    return save(draw_pairs(pairs, title), out / "correspondences")


@torch.no_grad()
def aligned_pair(
    net: nn.Module,
    layer: str,
    images: ImageSet,
    i: int,
    j: int,
    eps: float = 0.1,
    num_iters: int = 100,
) -> AlignedPair:
    """Images i and j, the assignment between their features at ``layer``, and the features."""
    x = floats(images, [i, j])
    A = features_at(net, layer, x.to(next(net.parameters()).device)).cpu()
    if A.ndim != 4:
        raise ValueError(
            f"correspondences are drawn for maps [b, c, h, w], but {layer} gives {list(A.shape)}"
        )
    positions = to_positions(A).transpose(1, 2)
    cost = pairwise_cost(positions[:1], positions[1:])
    plan = sinkhorn(cost, eps=eps, num_iters=num_iters).plan
    swap = torch.tensor([1, 0])

    def mixed(lam: float) -> Tensor:
        return align_mix(A, swap, torch.full((2,), lam), eps=eps, num_iters=num_iters)[0]

    maps = {
        "features A": A[0],
        "features A'": A[1],
        "A' aligned to A": mixed(0.0),
        "half and half": mixed(0.5),
    }
    colors = _principal_colors(torch.stack(list(maps.values())))
    pictures = dict(zip(maps, colors, strict=True))
    assignment = (plan[0] * plan.shape[-1]).numpy()
    return AlignedPair(shown(x[0]), shown(x[1]), assignment, pictures)


def _principal_colors(maps: Float[Tensor, "k c h w"]) -> NDArray[np.float32]:
    """Feature maps as pictures [k, h, w, 3]: their first three principal axes."""
    points = maps.permute(0, 2, 3, 1).flatten(0, 2)
    centerd = points - points.mean(0)
    _, _, axes = torch.linalg.svd(centerd, full_matrices=False)
    scores = centerd @ axes[:3].T
    low, high = scores.amin(0), scores.amax(0)
    k, _, h, w = maps.shape
    colors: NDArray[np.float32] = (
        ((scores - low) / (high - low).clamp(min=1e-6)).view(k, h, w, 3).numpy()
    )
    return colors


def draw_pairs(pairs: Sequence[AlignedPair], title: str) -> Figure:
    """One row a pair: the images with their correspondences as lines, then the feature maps.

    Each position of the first image is joined to the one it is assigned to most, in its own color;
    a faint line is a spread assignment.
    """
    titles = list(pairs[0].maps)
    figure = new_figure(3.6 + 1.5 * len(titles), 1.9 * len(pairs) + 0.4)
    grid = figure.add_gridspec(len(pairs), 1 + len(titles), width_ratios=[2.3] + [1] * len(titles))
    for row, pair in enumerate(pairs):
        _draw_lines(figure.add_subplot(grid[row, 0]), pair)
        for column, name in enumerate(titles, start=1):
            axes = figure.add_subplot(grid[row, column])
            show(axes, pair.maps[name], name if row == 0 else "")
    return write_titles(figure, title, size=10)


def _draw_lines(axes: Any, pair: AlignedPair) -> None:
    from matplotlib import colormaps

    height, width = pair.first.shape[:2]
    gap = max(2, width // 4)
    canvas = np.ones((height, 2 * width + gap, 3))
    canvas[:, :width], canvas[:, width + gap :] = pair.first, pair.second
    show(axes, canvas)
    r = len(pair.assignment)
    side = round(r**0.5)
    if side * side != r:
        raise ValueError(f"correspondences are drawn for square maps, got {r} positions")
    centers = (np.arange(side) + 0.5) * width / side - 0.5
    for i in range(r):
        j = int(pair.assignment[i].argmax())
        color = colormaps["viridis"](i / r)
        start = centers[i % side], centers[i // side]
        end = centers[j % side] + width + gap, centers[j // side]
        strength = float(np.clip(pair.assignment[i, j], 0.3, 1.0))
        axes.plot(*zip(start, end, strict=True), color=color, linewidth=1.0, alpha=strength)
        axes.plot(*start, marker="o", markersize=2.5, color=color)
