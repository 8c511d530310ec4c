"""What a method's card is drawn from: one pair of images, a network, and pictures of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Mixer
from alignmixup.figures.methods import FixedDraw, pair_batch, share_caption, small_style_network
from alignmixup.figures.sources import Source, shown
from alignmixup.figures.style import Picture
from alignmixup.ops.adain import AdaIN

LABEL = "Below each image: its soft label."


@dataclass(frozen=True)
class Card:
    """The pictures of one method, in rows of ``columns``, and the rest of their caption.

    ``note`` may name the network and the steps of small trainings, ``{network}``, ``{steps}`` and
    ``{block_steps}``.
    """

    title: str
    pictures: list[Picture]
    note: str
    columns: int = 5


@dataclass(frozen=True)
class Pair:
    """What a card is drawn from: a network, an anchor and its partner, and others beside them.

    ``rows`` are the two in ``images``; ``layer`` is where features are mixed, ``block_steps`` how
    long a method that learns its masks is trained.
    """

    net: nn.Module
    layer: str
    images: ImageSet
    rows: tuple[int, int]
    x: Float[Tensor, "b 3 h w"]
    y: Tensor
    style: AdaIN
    seed: int
    block_steps: int

    @classmethod
    def of(cls, source: Source, seed: int, adain_steps: int, block_steps: int) -> Pair:
        images = source.images
        rows, x, y = pair_batch(source, seed)
        style = small_style_network(images, adain_steps, seed).to(x.device)
        return cls(source.net, source.layer, images, rows, x, y, style, seed, block_steps)

    def name(self, k: int) -> str:
        return self.images.class_names[int(self.y[k])]

    def clean(self, count: int = 2) -> list[Picture]:
        """The images as they are, the pair first."""
        titles = ("anchor", "partner", *("another",) * (count - 2))
        return [Picture(t, shown(self.x[k]), self.name(k)) for k, t in enumerate(titles)]

    def mixed(
        self, mixer: Mixer, title: str, chosen: Mapping[str, object] | None = None, seed: int = 0
    ) -> Picture:
        """What the mixer gives to the network in the anchor's place; ``chosen`` sets its draw."""
        rng = torch.Generator().manual_seed(self.seed + seed)
        output = FixedDraw(mixer, chosen or {}).output(self.net, self.x, self.y, rng)
        return self.labeled(title, output.image, output.targets)

    def labeled(self, title: str, image: Tensor, targets: Tensor) -> Picture:
        """An image above its soft label."""
        return Picture(title, shown(image), share_caption(targets, self.images.class_names))


def heat_pictures(titles: Mapping[str, str], maps: Float[Tensor, "k h w"]) -> list[Picture]:
    """Maps, each scaled to its largest value, by their titles and captions."""
    heat = heat_maps(maps / maps.amax((1, 2), keepdim=True).clamp(min=1e-12))
    return [Picture(t, h, c) for (t, c), h in zip(titles.items(), list(heat), strict=True)]


def heat_maps(maps: Float[Tensor, "k h w"]) -> NDArray[np.float32]:
    """Numbers from 0 to 1 as colors from black over red and yellow to white."""
    levels = 3 * maps.detach().cpu().clamp(0, 1)
    colors = torch.stack([levels, levels - 1, levels - 2], dim=-1).clamp(0, 1)
    heat: NDArray[np.float32] = colors.float().numpy()
    return heat
