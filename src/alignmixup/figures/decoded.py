"""Figures of decoded features.

    interpolations   decoded mixes from lam = 0 to 1, unaligned above aligned, in both directions
    teaser           one pair under input mixup, CutMix, manifold mixup and AlignMixup

From a trained run that has a decoder; else from a small network trained on the built-in shapes,
which is kept in OUT/shapes-seedN and serves the next figure too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Mixer
from alignmixup.experiments.built_in import decoded_source
from alignmixup.experiments.painters import Painter
from alignmixup.figures import drawing as figures, drawing_decoded as drawing
from alignmixup.figures.gallery import different_pairs, floats, shown
from alignmixup.mixers import CutMix, InputMixup
from alignmixup.ops.align import Keep, align_mix
from alignmixup.ops.blend import blend

__all__ = ["interpolation", "interpolations", "teaser", "teaser_pictures"]

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NUM_INTERPOLATIONS = 4
TEASER_SHARE, TEASER_CENTRE = 0.6, [0.5, 0.3]


def interpolations(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    num_pairs: int = NUM_INTERPOLATIONS,
) -> list[Path]:
    """Draw the grid of decoded interpolations."""
    source = decoded_source(out, run, seed, data_root)
    pairs = [
        interpolation(
            source.painter, floats(source.images, [i, j]), SHARES, source.eps, source.num_iters
        )
        for i, j in different_pairs(source.images, num_pairs, seed)
    ]
    note = (
        r"$\lambda$: the share of $x$. Left: at 1 the decoded $x$, at 0 $x'$ on the positions of "
        r"$x$; "
        r"right: at 0 the decoded $x'$, at 1 $x$ on the positions of $x'$."
    )
    title = f"Decoded mixes of features: {source.what}"
    return figures.save(drawing.interpolation_grid(pairs, title, note), out / "interpolations")


@torch.no_grad()
def interpolation(
    painter: Painter,
    pair: Float[Tensor, "2 3 h w"],
    shares: Sequence[float] = SHARES,
    eps: float = 0.1,
    num_iters: int = 100,
) -> drawing.Interpolation:
    """Decode the mixes of two images' features, for each share of the first."""
    x = pair.to(next(painter.net.parameters()).device)
    A, swap = painter.features(x), torch.tensor([1, 0], device=x.device)

    def decoded(keep: Keep) -> Mapping[str, figures.Image]:
        rows: dict[str, list[Tensor]] = {"unaligned": [], "aligned": []}
        for value in shares:
            lam = torch.tensor(value, device=x.device)
            rows["unaligned"].append(blend(A, A[swap], lam)[0])
            mixed = align_mix(A, swap, lam, keep=keep, eps=eps, num_iters=num_iters)
            rows["aligned"].append(mixed[0])
        painted = {name: painter.paint(torch.stack(mixes)) for name, mixes in rows.items()}
        return {name: images.permute(0, 2, 3, 1).cpu().numpy() for name, images in painted.items()}

    first, second = shown(pair[0]), shown(pair[1])
    return drawing.Interpolation(
        first, second, tuple(shares), decoded("anchor"), decoded("partner")
    )


def teaser(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw one pair under two methods that mix images and two that mix features, decoded."""
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
    note = (
        f"Share of image 1: {TEASER_SHARE:g} (chosen, as is CutMix's box). Features mixed at "
        f"{source.painter.layer} and decoded:\n{source.what}."
    )
    title = "One pair under four methods"
    return figures.save(figures.gallery(pictures, title, note, columns=3), out / "teaser")


@torch.no_grad()
def teaser_pictures(
    painter: Painter,
    pair: Float[Tensor, "2 3 h w"],
    labels: Int[Tensor, " 2"],
    class_names: Sequence[str],
    *,
    eps: float = 0.1,
    num_iters: int = 100,
) -> list[figures.Picture]:
    """Image 1, input mixup, CutMix; image 2, manifold mixup and AlignMixup, both decoded.

    AlignMixup keeps the positions of image 2, as in the paper's own figure.
    """
    x = pair.to(next(painter.net.parameters()).device)
    mixed = interpolation(painter, pair, (TEASER_SHARE,), eps, num_iters)
    first, second = (class_names[int(label)] for label in labels)
    watcher = _Watcher(len(class_names))
    box: dict[str, float | list[float]] = {"lam": TEASER_SHARE, "centre": TEASER_CENTRE}
    chosen: dict[str, tuple[Mixer, dict[str, float | list[float]]]] = {
        "Input mixup": (InputMixup(), {"lam": TEASER_SHARE}),
        "CutMix": (CutMix(prob=1.0), box),
    }
    given = []
    for title, (mixer, values) in chosen.items():
        drawn = mixer.draw(2, torch.Generator().manual_seed(0)).with_tensors(
            {"perm": torch.tensor([1, 0]), **{k: torch.tensor(v) for k, v in values.items()}}
        )
        mixer.apply(watcher, x, labels.to(x.device), drawn)
        given.append(figures.Picture(title, shown(watcher.seen[0]), "as the network sees it"))
    return [
        figures.Picture("Image 1", shown(pair[0]), first),
        *given,
        figures.Picture("Image 2", shown(pair[1]), second),
        figures.Picture("Manifold mixup", mixed.keep_second["unaligned"][0], "decoded"),
        figures.Picture(
            "AlignMixup", mixed.keep_second["aligned"][0], "decoded; positions of image 2"
        ),
    ]


class _Watcher(nn.Module):
    """Stands in for a network and keeps the images it is given."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.seen = torch.empty(0)

    def forward(self, x: Tensor) -> Float[Tensor, "b k"]:
        self.seen = x
        return x.new_zeros(len(x), self.num_classes)
