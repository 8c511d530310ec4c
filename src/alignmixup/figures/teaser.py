"""One pair under two methods that mix images and two that mix features, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignmixup.experiments.built_in import decoded_source
from alignmixup.experiments.painters import Painter
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.interpolations import interpolation
from alignmixup.figures.methods import FixedDraw
from alignmixup.figures.sources import different_pairs, floats, shown
from alignmixup.figures.style import Picture, gallery, save
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup

SHARE, CENTRE = 0.6, [0.5, 0.3]


@register_figure("teaser", about="one pair under four methods, mixed features decoded")
def teaser(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw one pair under input mixup, CutMix, manifold mixup and AlignMixup."""
    source = decoded_source(out, run, seed, data_root)
    ((i, j),) = different_pairs(source.images, 1, seed)
    pictures = teaser_pictures(
        source.painter,
        floats(source.images, [i, j]),
        source.images.labels[[i, j]],
        source.images.class_names,
        eps=source.eps,
        num_iters=source.num_iters,
    )
    caption = (
        f"One pair under four methods. Share of image 1: {SHARE:g} (chosen, as is CutMix's box). "
        f"Features mixed at {source.painter.layer} and decoded: {source.what}."
    )
    figure = gallery(pictures, "One pair under four methods", columns=3)
    return save(figure, out / "teaser", caption)


@torch.no_grad()
def teaser_pictures(
    painter: Painter,
    pair: Float[Tensor, "2 3 h w"],
    labels: Int[Tensor, " 2"],
    class_names: Sequence[str],
    *,
    eps: float = 0.1,
    num_iters: int = 100,
) -> list[Picture]:
    """Image 1, input mixup, CutMix; image 2, manifold mixup and AlignMixup, both decoded.

    AlignMixup keeps the positions of image 2, as in the paper's own figure.
    """
    device = next(painter.net.parameters()).device
    mixed = interpolation(painter, pair, (SHARE,), eps, num_iters).keep_second
    first, second = (class_names[int(label)] for label in labels)
    methods = {
        "Input mixup": FixedDraw(InputMixup(), {"lam": SHARE}),
        "CutMix": FixedDraw(CutMix(prob=1.0), {"lam": SHARE, "center": CENTRE}),
    }
    outputs = {
        title: method.output(painter.net, pair.to(device), labels.to(device), torch.Generator())
        for title, method in methods.items()
    }
    seen = "as the network sees it"
    return [
        Picture("Image 1", shown(pair[0]), first),
        *[Picture(title, shown(output.image), seen) for title, output in outputs.items()],
        Picture("Image 2", shown(pair[1]), second),
        Picture("Manifold mixup", mixed["unaligned"][0], "decoded"),
        Picture("AlignMixup", mixed["aligned"][0], "decoded; positions of image 2"),
    ]
