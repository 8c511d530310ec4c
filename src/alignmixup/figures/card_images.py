"""Cards of the methods that mix pixels, boxes or blocks, and of those around another method."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from alignmixup.figures.card_pair import LABEL, Card, Pair, heat_maps, heat_pictures
from alignmixup.figures.methods import SHARE, recorded, share_caption
from alignmixup.figures.sources import shown
from alignmixup.figures.style import BLUE, Picture
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.fmix import FMix
from alignmixup.mixers.gridmix import GridMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.regmixup import RegMixup
from alignmixup.mixers.resizemix import ResizeMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.smoothmix import SmoothMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.ops.adain import adain, save_adain, style_statistics
from alignmixup.ops.gradient_saliency import gradient_saliency
from alignmixup.ops.saliency import fine_grained_saliency

CO_INPUTS = 6
CENTER = [0.5, 0.35]
BARS = 8  # classes of the card of the decoupled loss


def input_mixup(pair: Pair) -> Card:
    shares = (0.75, 0.5, 0.25)
    mixed = [pair.mixed(InputMixup(), f"lam = {lam:g}", {"lam": lam}) for lam in shares]
    anchor, partner = pair.clean()
    return Card("Input mixup: every pixel lam x + (1 - lam) x'", [anchor, *mixed, partner], LABEL)


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


def resizemix(pair: Pair) -> Card:
    boxes = ((0.3, [0.3, 0.3]), (0.5, [0.5, 0.4]), (0.8, [0.5, 0.6]))
    mixed = [
        pair.mixed(ResizeMix(), f"side {tau:g}", {"lam": 1 - tau * tau, "center": center})
        for tau, center in boxes
    ]
    note = f"The side of the box is a share of the image's, from 0.1 to 0.8. {LABEL}"
    return Card("ResizeMix: the whole partner is shrunk and pasted", [*pair.clean(), *mixed], note)


def fmix(pair: Pair) -> Card:
    mixed = [pair.mixed(FMix(), f"draw {k}", {"lam": SHARE}, k) for k in range(1, 4)]
    note = f"lam = {SHARE} in each: the largest values of low-frequency noise. {LABEL}"
    return Card("FMix: masks from low-frequency noise", [*pair.clean(), *mixed], note)


def gridmix(pair: Pair) -> Card:
    chosen = {"lam": SHARE}
    mixed = [
        pair.mixed(GridMix(), "holes, draw 1", chosen, 1),
        pair.mixed(GridMix(), "holes, draw 2", chosen, 2),
        pair.mixed(GridMix(grid="cells"), "4 x 4 cells", chosen, 1),
    ]
    note = f"lam = {SHARE}; holes are GridMixup of Dobrynin, cells GridMix of Baek et al. {LABEL}"
    return Card("GridMix: the partner in a grid", [*pair.clean(), *mixed], note)


def smoothmix(pair: Pair) -> Card:
    bells = (([0.5, 0.5], 0.0), ([0.3, 0.35], 0.5), ([0.8, 0.6], 1.0))
    mixed = [
        pair.mixed(SmoothMix(), f"draw {k}", {"center": center, "spread": spread})
        for k, (center, spread) in enumerate(bells, start=1)
    ]
    note = f"Three centers, with a standard deviation of 1/4, 3/8 and 1/2 of the side. {LABEL}"
    return Card("SmoothMix: the partner through a Gaussian", [*pair.clean(), *mixed], note)


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
    salient = heat_pictures({"saliency of the anchor": "", "of the partner": ""}, maps)
    mixed = [
        pair.mixed(PuzzleMix(grids=(n,)), f"{n} x {n} blocks", {"lam": 0.5}) for n in (2, 4, 8, 16)
    ]
    note = (
        "lam = 0.5 is only the prior; the label is the share of the blocks. Salient blocks are "
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
    outputs = [pair.labeled(f"output {k + 1}", seen.images[k], targets[k]) for k in range(len(x))]
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
        box = {"lam": SHARE, "center": CENTER, "style": 0.3, "gamma": 0.2}
        mixed = [
            pair.mixed(mix, "StyleMix", {"content": 0.8, "style": 0.3, "joint": 0.5, "lam": lam}),
            pair.mixed(cut, "StyleCutMix", box),
        ]
    note = (
        "StyleMix: 80 % of the content, 30 % of the style. StyleCutMix: a box of the partner, "
        "30 % of the style everywhere. A small AdaIN network after {steps} steps. " + LABEL
    )
    title = "StyleMix and StyleCutMix: content and style by shares of their own"
    return Card(title, [*pair.clean(), *styled, *mixed], note, columns=6)


def regmixup(pair: Pair) -> Card:
    mixer, lam = RegMixup(), torch.tensor(SHARE)
    draw = mixer.draw(2, torch.Generator().manual_seed(pair.seed))
    draw = draw.with_tensors({"perm": torch.tensor([1, 0]), "lam": lam})
    with recorded(pair.net) as seen:
        mixer.apply(pair.net, pair.x[:2], pair.y[:2], draw)
    # The network gets the clean batch and the mixed one, joined.
    rows = torch.nn.functional.one_hot(pair.y[:2], pair.images.num_classes).float()
    labels = torch.cat([rows, torch.lerp(rows[[1, 0]], rows, SHARE)])
    titles = ("clean 1", "clean 2", "mixed 1", "mixed 2")
    pictures = [pair.labeled(*of) for of in zip(titles, seen.images, labels, strict=True)]
    note = f"A batch of two as the network gets it; lam = {SHARE} (drawn near 0.5). {LABEL}"
    return Card("RegMixup: mixed images beside the clean ones", pictures, note, columns=4)


def oneof(pair: Pair) -> Card:
    mixer = OneOf()
    pictures = []
    for k in range(3):
        rng = torch.Generator().manual_seed(pair.seed + k)
        method = mixer.draw(2, rng).case.partition("/")[0]
        chosen = {"lam": (0.7, 0.5, 0.6)[k], "center": CENTER}
        pictures.append(pair.mixed(mixer, f"batch {k + 1}: {method}", chosen, k))
    smooth = LabelSmoothing(CutMix(prob=1.0), 0.1)
    pictures.append(pair.mixed(smooth, "smoothed labels", {"lam": SHARE, "center": CENTER}))
    note = (
        "The first three batches of a switch between input mixup and CutMix; right, CutMix with "
        f"10 % of the label spread over all classes. {LABEL}"
    )
    title = "OneOf: one of several methods for each batch"
    return Card(title, [*pair.clean(), *pictures], note, columns=6)


def decoupled(pair: Pair) -> Card:
    """The probabilities that the two terms of the loss compare, for one mixed image."""
    mixed = pair.mixed(CutMix(prob=1.0), "CutMix", {"lam": 0.45, "center": [0.5, 0.6]})
    image = torch.from_numpy(mixed.image).permute(2, 0, 1).to(pair.x)
    with torch.no_grad():
        logits = pair.net(image[None])[0].cpu()
    a, b = int(pair.y[0]), int(pair.y[1])
    others = [k for k in logits.argsort(descending=True).tolist() if k not in (a, b)]
    shown_classes = [a, b, *others[: BARS - 2]]
    names = pair.images.class_names
    terms = {"both compete": None, f"{names[a]} alone": b, f"{names[b]} alone": a}
    drawn = []
    for title, left_out in terms.items():
        z = logits.clone()
        if left_out is not None:
            z[left_out] = -torch.inf
        p = z.softmax(0)
        kept = p.where((torch.arange(len(p)) == a) | (torch.arange(len(p)) == b), 0)
        caption = share_caption(kept, names) or "less than 0.5%"
        drawn.append(Picture(title, shown(_bars(p[shown_classes])), caption))
    note = (
        f"Bars: probabilities of {names[a]}, {names[b]} and the next {BARS - 2} classes, as the "
        "terms of the loss compare them: both mixed classes against each other, then each without "
        "the other; {network}."
    )
    title = "Decoupled mixup: each mixed class also competes without the other"
    return Card(title, [*pair.clean(), mixed, *drawn], note, columns=6)


def _bars(heights: Tensor) -> Tensor:
    """Bars from 0 to 1 as an image [3, h, w]."""
    side = 8 * len(heights)
    color = torch.tensor([int(BLUE[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    row = torch.arange(side, 0, -1).unsqueeze(1) - 0.5
    is_bar = (row < (heights * side).repeat_interleave(8)) & (torch.arange(side) % 8 < 6)
    background = torch.full((3, 1, 1), 0.93)
    return torch.where(is_bar, color.view(3, 1, 1), background)
