"""What is matched with what in pairs of images, and their features before and after alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from alignmixup.contracts import ImageSet
from alignmixup.experiments.painters import features_at
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import (
    different_pairs,
    drawn,
    floats,
    run_source,
    shown,
    trained_source,
)
from alignmixup.figures.style import PALETTE, Figure, Image, new_figure, save, show, write_title
from alignmixup.ops.align import align_mix, to_positions
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

NUM_PAIRS = 5
MIN_MASS = 0.25  # of a position, for a match to be drawn
MOST_MATCHES = 10  # of a pair: more lines cannot be distinguished


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
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    num_pairs: int = NUM_PAIRS,
) -> list[Path]:
    """Draw pairs of images with lines between matched positions, and their feature maps.

    Without a run, of the small network that is trained on shapes.
    """
    source = trained_source(out, None, seed, None) if run is None else run_source(run, data_root)
    pairs = [
        aligned_pair(source.net, source.layer, source.images, i, j, source.eps, source.num_iters)
        for i, j in different_pairs(source.images, num_pairs, seed)
    ]
    caption = (
        f"Correspondences and features at {source.layer}: {source.what}. A position of the left "
        "image is joined to the position of the right one that it is assigned to most, if that "
        f"one receives at least {MIN_MASS:.0%} of its mass and it is the strongest in return; of "
        f"each pair the {MOST_MATCHES} matches of most mass. Right: the features on their first "
        f"three principal axes. {drawn(len(pairs), num_pairs)}"
    )
    figure = draw_pairs(pairs, f"What is matched with what at {source.layer}")
    return save(figure, out / "correspondences", caption)


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
    """Feature maps as pictures [k, h, w, 3]: their first three principal axes, black if fewer."""
    points = maps.permute(0, 2, 3, 1).flatten(0, 2)
    centered = points - points.mean(0)
    _, _, axes = torch.linalg.svd(centered, full_matrices=False)
    scores = centered @ axes[:3].T
    scores = F.pad(scores, (0, 3 - scores.shape[1]))
    low, high = scores.amin(0), scores.amax(0)
    k, _, h, w = maps.shape
    colors: NDArray[np.float32] = (
        ((scores - low) / (high - low).clamp(min=1e-6)).view(k, h, w, 3).numpy()
    )
    return colors


def draw_pairs(pairs: Sequence[AlignedPair], title: str) -> Figure:
    """One row a pair: the images with their matches as lines, then the feature maps."""
    titles = list(pairs[0].maps)
    figure = new_figure(4.2 + 1.5 * len(titles), 1.9 * len(pairs) + 0.4)
    grid = figure.add_gridspec(len(pairs), 1 + len(titles), width_ratios=[2.5] + [1] * len(titles))
    for row, pair in enumerate(pairs):
        _draw_matches(figure.add_subplot(grid[row, 0]), pair)
        for column, name in enumerate(titles, start=1):
            axes = figure.add_subplot(grid[row, column])
            show(axes, pair.maps[name], name if row == 0 else "")
    return write_title(figure, title)


def matches(assignment: Image, min_mass: float = MIN_MASS) -> list[tuple[int, int, float]]:
    """Position of the first image, position of the second, mass: pairs that choose each other.

    A position whose mass is spread over many has no match. The strongest come first.
    """
    best = assignment.argmax(1)
    found = [
        (i, int(j), float(assignment[i, j]))
        for i, j in enumerate(best)
        if assignment[i, j] >= min_mass and assignment[:, j].argmax() == i
    ]
    return sorted(found, key=lambda match: -match[2])


def _draw_matches(axes: Any, pair: AlignedPair) -> None:
    from matplotlib.patheffects import withStroke

    height, width = pair.first.shape[:2]
    gap = max(2, width // 2)
    canvas = np.ones((height, 2 * width + gap, 3))
    canvas[:, :width], canvas[:, width + gap :] = pair.first, pair.second
    show(axes, canvas)
    r = len(pair.assignment)
    side = round(r**0.5)
    if side * side != r:
        raise ValueError(f"correspondences are drawn for square maps, got {r} positions")
    centers = (np.arange(side) + 0.5) * width / side - 0.5
    for number, (i, j, mass) in enumerate(matches(pair.assignment)[:MOST_MATCHES]):
        x = centers[i % side], centers[j % side] + width + gap
        y = centers[i // side], centers[j // side]
        # A rim, so that lines and ends stay visible on images of any color.
        rim = [withStroke(linewidth=1.2 + 1.6 * mass, foreground="white")]
        ends = {"marker": "o", "markersize": 3.5, "markeredgecolor": "white"}
        color = PALETTE[number % len(PALETTE)]
        axes.plot(x, y, color=color, linewidth=0.4 + 1.6 * mass, path_effects=rim, **ends)
