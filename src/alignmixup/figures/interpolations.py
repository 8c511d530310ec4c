"""Decoded mixes of two images' features from lam = 0 to 1, aligned above unaligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.experiments.built_in import decoded_source
from alignmixup.experiments.painters import Painter
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import different_pairs, drawn, floats, shown
from alignmixup.figures.style import Figure, Image, new_figure, save, write_title
from alignmixup.ops.align import Keep, align_mix
from alignmixup.ops.blend import blend

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NUM_PAIRS = 3
INCHES = 1.1  # of a picture on a screen


@dataclass(frozen=True)
class Interpolation:
    """Two images and decoded mixes of their features, one for each share of the first image.

    ``keep_first`` has mixes [k, h, w, 3] on the first image's positions, by the name of their row
    (aligned, unaligned); ``keep_second`` those on the second's. ``names`` are the classes.
    """

    first: Image
    second: Image
    shares: tuple[float, ...]
    keep_first: Mapping[str, Image]
    keep_second: Mapping[str, Image]
    names: tuple[str, str] = ("", "")


@register_figure("interpolations", about="decoded mixes of the features of two images")
def interpolations(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    num_pairs: int = NUM_PAIRS,
) -> list[Path]:
    """Draw the grid of decoded interpolations."""
    source = decoded_source(out, run, seed, data_root)
    images, pairs = source.images, []
    for i, j in different_pairs(images, num_pairs, seed):
        first, second = (images.class_names[int(images.labels[k])] for k in (i, j))
        made = interpolation(
            source.painter, floats(images, [i, j]), SHARES, source.eps, source.num_iters
        )
        pairs.append(replace(made, names=(first, second)))
    caption = (
        f"Decoded mixes of features: {source.what}. Columns: the share of x, from all to none. "
        "Aligned, x keeps its positions and takes the features of x'; unaligned, x turns into x'. "
        + drawn(len(pairs), num_pairs)
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
        rows: dict[str, list[Tensor]] = {"aligned": [], "unaligned": []}
        for value in shares:
            lam = torch.tensor(value, device=x.device)
            mixed = align_mix(A, swap, lam, keep=keep, eps=eps, num_iters=num_iters)
            rows["aligned"].append(mixed[0])
            rows["unaligned"].append(blend(A, A[swap], lam)[0])
        painted = {name: painter.paint(torch.stack(mixes)) for name, mixes in rows.items()}
        return {name: images.permute(0, 2, 3, 1).cpu().numpy() for name, images in painted.items()}

    first, second = shown(pair[0]), shown(pair[1])
    return Interpolation(first, second, tuple(shares), decoded("anchor"), decoded("partner"))


def draw_interpolations(pairs: Sequence[Interpolation], title: str) -> Figure:
    """A block a pair: x above x', then their mixes on the positions of x from lam = 1 to 0.

    The rows of a block are those of the mappings, in their order. All pictures lie in one pair of
    axes, a picture one unit wide, so that no label moves them. The other direction is that of the
    pair (x', x), so it is not drawn.
    """
    rows, step, start = list(pairs[0].keep_first), 1.06, 1.5
    block = len(rows) * step + 0.2
    width, height = start + len(pairs[0].shares) * step, len(pairs) * block
    figure = new_figure(INCHES * width, INCHES * height + 0.1)
    axes = figure.subplots()
    for number, pair in enumerate(pairs):
        top = number * block
        for row, (symbol, name) in enumerate(zip(("$x$", "$x'$"), pair.names, strict=True)):
            image = (pair.first, pair.second)[row]
            _place(axes, image, 0, top + row * step)
            _label(axes, -0.08, top + row * step + 0.5, f"{symbol} {name}".strip())
        for row, name in enumerate(rows):
            _label(axes, start - 0.08, top + row * step + 0.5, name)
            # From x on the left, which stands beside x, to none of it.
            for column, image in enumerate(reversed(pair.keep_first[name])):
                _place(axes, image, start + column * step, top + row * step)
    for column, share in enumerate(reversed(pairs[0].shares)):
        axes.text(start + column * step + 0.5, -0.06, f"{share:g}", ha="center", va="bottom")
    axes.text(start - 0.08, -0.06, r"share $\lambda$ of $x$", ha="right", va="bottom")
    axes.set(xlim=(-0.4, width), ylim=(height - 0.2, -0.4), aspect="equal")
    axes.set_axis_off()
    return write_title(figure, title)


def _place(axes: Any, image: Image, left: float, top: float) -> None:
    """One picture, a unit wide."""
    extent = (left, left + 1, top + 1, top)
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest", extent=extent)


def _label(axes: Any, right: float, middle: float, text: str) -> None:
    """Words beside a picture, along its height."""
    axes.text(right, middle, text, rotation=90, ha="right", va="center")
