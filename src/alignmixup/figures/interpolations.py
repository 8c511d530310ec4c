"""Decoded mixes of two images' features from lam = 0 to 1, unaligned above aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.experiments.built_in import decoded_source
from alignmixup.experiments.painters import Painter
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import different_pairs, floats, shown
from alignmixup.figures.style import Image, new_figure, save, write_title
from alignmixup.ops.align import Keep, align_mix
from alignmixup.ops.blend import blend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Interpolation", "draw_interpolations", "interpolation", "interpolations"]

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NUM_PAIRS = 4


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


@register_figure("interpolations", about="decoded mixes of the features of two images")
def interpolations(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw the grid of decoded interpolations."""
    source = decoded_source(out, run, seed, data_root)
    pairs = [
        interpolation(
            source.painter, floats(source.images, [i, j]), SHARES, source.eps, source.num_iters
        )
        for i, j in different_pairs(source.images, NUM_PAIRS, seed)
    ]
    caption = (
        f"Decoded mixes of features: {source.what}. lambda is the share of x. Left: at 1 the "
        "decoded x, at 0 x' on the positions of x; right: at 0 the decoded x', at 1 x on the "
        "positions of x'. Pairs drawn at random."
    )
    figure = draw_interpolations(pairs, "Decoded mixes of the features of two images")
    return save(figure, out / "interpolations", caption)


@torch.no_grad()
def interpolation(
    painter: Painter,
    pair: Float[Tensor, "2 3 h w"],
    shares: Sequence[float] = SHARES,
    eps: float = 0.1,
    num_iters: int = 100,
) -> Interpolation:
    """Decode the mixes of two images' features, for each share of the first."""
    x = pair.to(next(painter.net.parameters()).device)
    A, swap = painter.features(x), torch.tensor([1, 0], device=x.device)

    def decoded(keep: Keep) -> Mapping[str, Image]:
        rows: dict[str, list[Tensor]] = {"unaligned": [], "aligned": []}
        for value in shares:
            lam = torch.tensor(value, device=x.device)
            rows["unaligned"].append(blend(A, A[swap], lam)[0])
            mixed = align_mix(A, swap, lam, keep=keep, eps=eps, num_iters=num_iters)
            rows["aligned"].append(mixed[0])
        painted = {name: painter.paint(torch.stack(mixes)) for name, mixes in rows.items()}
        return {name: images.permute(0, 2, 3, 1).cpu().numpy() for name, images in painted.items()}

    first, second = shown(pair[0]), shown(pair[1])
    return Interpolation(first, second, tuple(shares), decoded("anchor"), decoded("partner"))


def draw_interpolations(pairs: Sequence[Interpolation], title: str) -> Figure:
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
            axes.text(*at, name, rotation=90, ha="right", va="center", fontsize="small")
    for start, kept in zip(starts, ("x", "x'"), strict=True):
        heading = rf"positions of ${kept}$ kept, $\lambda$ ="
        axes.text(start + k * step / 2, -0.5, heading, ha="center")
    axes.set(xlim=(-0.05, width), ylim=(height, -0.9), aspect="equal")
    axes.set_axis_off()
    return write_title(figure, title)


def _place(axes: Any, image: Image, left: float, top: float, label: str) -> None:
    """One picture, a unit wide, with its label above it."""
    extent = (left, left + 1, top + 1, top)
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest", extent=extent)
    if label:
        axes.text(left + 0.5, top - 0.08, label, ha="center", va="bottom", fontsize="small")
