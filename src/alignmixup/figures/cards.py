"""One picture for each method's card: what the method does to a pair of images, step by step.

Every image is what the mixer gave to the network, its caption the soft label the mixer gave beside
it; saliency, features and stylised images are those of the same networks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Mixer
from alignmixup.experiments.painters import features_at
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.methods import (
    SHARE,
    FixedDraw,
    recorded,
    share_caption,
    small_style_network,
    with_others,
)
from alignmixup.figures.sources import different_pairs, floats, network_source, shown
from alignmixup.figures.style import Picture, gallery, save
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.ops.adain import AdaIN, adain, save_adain, style_statistics
from alignmixup.ops.blend import blend
from alignmixup.ops.gradient_saliency import gradient_saliency
from alignmixup.ops.saliency import fine_grained_saliency

__all__ = ["CARDS", "Card", "Pair", "cards"]

CARD_STEPS = 2000  # of the style network: a minute on one core
CO_INPUTS = 6
FEATURE_LAYER = "layer2"


@dataclass(frozen=True)
class Pair:
    """What a card is drawn from: a network, an anchor and its partner, and others beside them."""

    net: nn.Module
    images: ImageSet
    x: Float[Tensor, "b 3 h w"]
    y: Tensor
    style: AdaIN
    seed: int

    @classmethod
    def of(cls, net: nn.Module, images: ImageSet, seed: int, adain_steps: int) -> Pair:
        chosen = with_others(images, *different_pairs(images, 1, seed)[0], seed)
        device = next(net.parameters()).device
        x, y = floats(images, chosen).to(device), images.labels[chosen].to(device)
        style = small_style_network(images, adain_steps, seed).to(device)
        return cls(net, images, x, y, style, seed)

    def name(self, k: int) -> str:
        return self.images.class_names[int(self.y[k])]

    def clean(self) -> list[Picture]:
        """The two images as they are."""
        titles = ("anchor", "partner")
        return [Picture(t, shown(self.x[k]), self.name(k)) for k, t in enumerate(titles)]

    def mixed(
        self, mixer: Mixer, title: str, chosen: Mapping[str, object] | None = None, seed: int = 0
    ) -> Picture:
        """What the mixer gives to the network in the anchor's place; ``chosen`` sets its draw."""
        rng = torch.Generator().manual_seed(self.seed + seed)
        output = FixedDraw(mixer, chosen or {}).output(self.net, self.x, self.y, rng)
        caption = share_caption(output.targets, self.images.class_names)
        return Picture(title, shown(output.image), caption)


@dataclass(frozen=True)
class Card:
    """The pictures of one method, in rows of ``columns``, and a line below them."""

    title: str
    pictures: list[Picture]
    note: str
    columns: int = 5


@register_figure("cards", about="a picture of each method by itself")
def cards(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw every card into the folder ``methods``."""
    source = network_source(run, seed, data_root)
    pair = Pair.of(source.net, source.images, seed, CARD_STEPS)
    written = []
    for number, (name, make) in enumerate(CARDS.items(), start=1):
        print(f"card {number} of {len(CARDS)}: {name}", file=sys.stderr)
        card = make(pair)
        note = card.note.format(network=source.what, steps=CARD_STEPS)
        figure = gallery(card.pictures, card.title, card.columns)
        caption = f"{card.title}. {' '.join(note.split())}"
        written += save(figure, out / "methods" / name, caption)
    return written


def input_mixup(pair: Pair) -> Card:
    shares = (0.75, 0.5, 0.25)
    mixed = [pair.mixed(InputMixup(), f"lam = {lam:g}", {"lam": lam}) for lam in shares]
    anchor, partner = pair.clean()
    return Card("Input mixup: every pixel lam x + (1 - lam) x'", [anchor, *mixed, partner], LABEL)


LABEL = "Below each image: its soft label."


def manifold_mixup(pair: Pair) -> Card:
    """Maps of a layer, as the mean size of their channels."""
    with torch.no_grad():
        maps = features_at(pair.net, FEATURE_LAYER, pair.x[:2])
    lam = torch.full((2,), SHARE, device=maps.device)
    both = torch.stack([maps[0], maps[1], blend(maps, maps[[1, 0]], lam)[0]]).abs().mean(1)
    heat = heat_maps(both / both.amax())
    label = f"{pair.name(0)} {SHARE:.0%}, {pair.name(1)} {1 - SHARE:.0%}"
    titles = ("features A", "features A'", f"lam = {SHARE:g}: mixed")
    captions = (pair.name(0), pair.name(1), label)
    drawn = [Picture(*of) for of in zip(titles, list(heat), captions, strict=True)]
    note = f"Mean size over the channels of {FEATURE_LAYER}; {{network}}. {LABEL}"
    return Card("Manifold mixup: the same, with features of a layer", [*pair.clean(), *drawn], note)


def cutout(pair: Pair) -> Card:
    side = pair.images.images.shape[-1]
    mixer = Cutout(side // 2, pair.images.mean)
    holes = [pair.mixed(mixer, f"draw {k}", seed=k) for k in range(1, 5)]
    note = f"A square of half the side, its center anywhere in the image. {LABEL}"
    return Card("Cutout: a square is removed, the label stays", [pair.clean()[0], *holes], note)


def cutmix(pair: Pair) -> Card:
    boxes = ((0.8, [0.5, 0.35]), (0.6, [0.35, 0.6]), (0.3, [0.6, 0.55]))
    mixed = [
        pair.mixed(CutMix(prob=1.0), f"lam = {lam:g} drawn", {"lam": lam, "center": center})
        for lam, center in boxes
    ]
    note = "The label is the share of the pixels: a box that is cut off at the border counts less."
    return Card("CutMix: a box of the partner is pasted", [*pair.clean(), *mixed], note)


def saliencymix(pair: Pair) -> Card:
    maps = fine_grained_saliency(pair.x[1:2])
    heat = heat_maps(maps / maps.amax().clamp(min=1))[0]
    mixer = SaliencyMix(prob=1.0, saliency="per_sample")
    pictures = [
        *pair.clean(),
        Picture("saliency of the partner", heat, "fine-grained, of the image alone"),
        *[pair.mixed(mixer, f"lam = {lam:g} drawn", {"lam": lam}) for lam in (0.8, 0.5)],
    ]
    note = f"One box for each pair; the authors' code takes one for the whole batch. {LABEL}"
    return Card("SaliencyMix: the box lies where the partner is most salient", pictures, note)


def puzzlemix(pair: Pair) -> Card:
    maps = gradient_saliency(pair.net, pair.x[:2], pair.y[:2]).maps
    heat = heat_maps(maps / maps.amax((1, 2), keepdim=True))
    titles = ("saliency of the anchor", "of the partner")
    salient = [Picture(t, h, "") for t, h in zip(titles, list(heat), strict=True)]
    mixed = [
        pair.mixed(PuzzleMix(grids=(n,)), f"{n} x {n} blocks", {"lam": 0.5}) for n in (2, 4, 8, 16)
    ]
    note = (
        "lam = 0.5 is only the prior; the label is the share of the blocks. Salient blocks are\n"
        "moved into view. Saliency: {network}."
    )
    title = "PuzzleMix: blocks of either image, or half of both, chosen by saliency"
    return Card(title, [*pair.clean(), *salient, *mixed], note, columns=4)


def comixup(pair: Pair) -> Card:
    mixer = CoMixup(part_size=CO_INPUTS)
    x, y = pair.x[:CO_INPUTS], pair.y[:CO_INPUTS]
    draw = mixer.draw(len(x), torch.Generator().manual_seed(pair.seed))
    with recorded(pair.net) as seen:
        targets = mixer.apply(pair.net, x, y, draw).targets
    assert targets is not None
    inputs = [Picture(f"input {k + 1}", shown(x[k]), pair.name(k)) for k in range(len(x))]
    outputs = [
        Picture(
            f"output {k + 1}",
            shown(seen.images[k]),
            share_caption(targets[k], pair.images.class_names).replace(", ", "\n"),
        )
        for k in range(len(x))
    ]
    note = f"A part of {len(x)} inputs (20 is the default), 4 x 4 blocks. Saliency: {{network}}."
    title = "Co-Mixup: many inputs into as many outputs, jointly"
    return Card(title, [*inputs, *outputs], note, columns=len(x))


def stylemix(pair: Pair) -> Card:
    size = (pair.x.shape[2], pair.x.shape[3])
    with torch.no_grad():
        f = pair.style.encode(pair.x[:2])
        swapped = pair.style.decode(adain(f, style_statistics(f[[1, 0]])), size)
    styled = [
        Picture("anchor, partner's style", shown(swapped[0]), "f12, decoded"),
        Picture("partner, anchor's style", shown(swapped[1]), "f21, decoded"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "adain.safetensors")
        save_adain(pair.style, weights)
        mix, cut = StyleMix(weights=weights, prob=1.0), StyleCutMix(weights=weights, prob=1.0)
        lam = 0.8 * mix.content_weight + 0.3 * (1 - mix.content_weight)
        box = {"lam": SHARE, "center": [0.5, 0.35], "style": 0.3, "gamma": 0.2}
        mixed = [
            pair.mixed(mix, "StyleMix", {"content": 0.8, "style": 0.3, "joint": 0.5, "lam": lam}),
            pair.mixed(cut, "StyleCutMix", box),
        ]
    note = (
        "StyleMix: 80 % of the content, 30 % of the style. StyleCutMix: a box of the partner,\n"
        "30 % of the style everywhere. A small AdaIN network after {steps} steps. " + LABEL
    )
    pictures = [*pair.clean(), *styled, *mixed]
    return Card("StyleMix and StyleCutMix: content and style by shares of their own", pictures,
                note, columns=3)  # fmt: skip


CARDS: Mapping[str, Callable[[Pair], Card]] = {
    "input_mixup": input_mixup,
    "manifold_mixup": manifold_mixup,
    "cutout": cutout,
    "cutmix": cutmix,
    "saliencymix": saliencymix,
    "puzzlemix": puzzlemix,
    "comixup": comixup,
    "stylemix": stylemix,
}


def heat_maps(maps: Float[Tensor, "k h w"]) -> NDArray[np.float32]:
    """Numbers from 0 to 1 as colors from black over red and yellow to white."""
    levels = 3 * maps.detach().cpu().clamp(0, 1)
    colors = torch.stack([levels, levels - 1, levels - 2], dim=-1).clamp(0, 1)
    heat: NDArray[np.float32] = colors.float().numpy()
    return heat
