"""Cards of the methods that read or mix what is inside a network, and of those that learn."""

from __future__ import annotations

import sys
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.experiments.painters import features_at
from alignmixup.figures.card_pair import LABEL, Card, Pair, heat_maps, heat_pictures
from alignmixup.figures.correspondences import aligned_pair
from alignmixup.figures.methods import SHARE, recorded
from alignmixup.figures.sources import floats, shown
from alignmixup.figures.style import Image, Picture
from alignmixup.hooks import evaluating
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.attention import clean_map, find_classifier
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.automix import AutoMix, PairLearned
from alignmixup.mixers.boxes import share_mask
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.learned import Learned
from alignmixup.mixers.multimix import similarity
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.snapmix import SnapMix, class_maps
from alignmixup.mixers.stateful import run_to
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import attended_share
from alignmixup.ops.blend import blend
from alignmixup.ops.philox import dirichlet

FEATURE_LAYER = "layer2"
CENTER = [0.5, 0.35]
CLASSIFIER = "head.linear"
BLOCK_BATCH, BLOCK_LR = 12, 0.02
NUM_MIXES = 20

AnyLearned = TypeVar("AnyLearned", bound=Learned)


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


def alignmixup(pair: Pair) -> Card:
    """Features on their principal axes, and the partner's patches carried by the same plan."""
    made = aligned_pair(pair.net, pair.layer, pair.images, *pair.rows)
    anchor, partner = pair.clean()
    carried = carried_patches(made.assignment, made.second)
    half = 0.5 * made.first + 0.5 * carried
    pictures = [
        anchor,
        partner,
        Picture("partner's patches, moved", carried, "to the anchor's positions"),
        Picture("half and half", half, "of the patches"),
        *[Picture(title, image, "") for title, image in made.maps.items()],
    ]
    side = round(len(made.assignment) ** 0.5)
    note = (
        f"Above, patches of pixels moved by the transport plan between the {side} x {side} "
        f"positions of {pair.layer}, to show the plan; below, what is mixed: the features, on "
        "their first three principal axes; {network}."
    )
    title = "AlignMixup: match positions by transport, then interpolate"
    return Card(title, pictures, note, columns=4)


def carried_patches(assignment: Image, image: Image) -> Image:
    """An image whose patch i is the mean of all patches, weighted by row i of the assignment."""
    side = round(len(assignment) ** 0.5)
    h, w = image.shape[0] // side, image.shape[1] // side
    patches = image[: side * h, : side * w].reshape(side, h, side, w, 3).swapaxes(1, 2)
    weights = assignment / assignment.sum(1, keepdims=True)
    moved = (weights @ patches.reshape(side * side, -1)).reshape(side, side, h, w, 3)
    result: Image = np.clip(moved.swapaxes(1, 2).reshape(side * h, side * w, 3), 0, 1)
    return result


def multimix(pair: Pair) -> Card:
    maps = clean_map(pair.net, pair.x[:2], pair.layer)
    flat = maps.flatten(2)
    attention = similarity(flat.float(), flat.float().mean(2)).view(2, *maps.shape[2:])
    shape = (len(pair.x), NUM_MIXES)
    seed = torch.tensor(pair.seed)
    weights = torch.stack([dirichlet(seed, torch.tensor(a), shape, dim=0) for a in (0.5, 2.0)])
    size = f"{shape[0]} images x {shape[1]} mixes"
    pictures = [
        *heat_pictures({"weights, alpha 0.5": size, "weights, alpha 2": size}, weights),
        *heat_pictures({"attention, anchor": "dense form", "attention, partner": ""}, attention),
    ]
    note = (
        "Each column of the weights is one mix of all embeddings of a batch: there is no mixed "
        "image. The dense form mixes at each position, weighted by attention; {network}."
    )
    title = "MultiMix: many mixes of all embeddings of a batch"
    return Card(title, [*pair.clean(), *pictures], note, columns=6)


def attentivemix(pair: Pair) -> Card:
    mixer = AttentiveMix(layer=pair.layer)
    maps = clean_map(pair.net, pair.x[1:2], pair.layer).float().mean(1)
    pictures = [
        *heat_pictures({"map of the partner": ""}, maps - maps.amin()),
        *[pair.mixed(mixer, f"lam = {lam:g} drawn", {"lam": lam}) for lam in (0.8, 0.5)],
    ]
    note = f"The guide is the network itself; {{network}}. {LABEL}"
    title = "AttentiveMix: the partner's cells of the largest attention"
    return Card(title, [*pair.clean(), *pictures], note)


def snapmix(pair: Pair) -> Card:
    maps = _class_maps(pair, pair.x[:2], pair.y[:2])
    titles = {"class map, anchor": "", "class map, partner": ""}
    mixer = SnapMix(pair.layer, CLASSIFIER)
    boxes = (
        {"lam": 0.7, "lam2": 0.4, "center": [CENTER, [0.5, 0.5]]},
        {"lam": 0.5, "lam2": 0.8, "center": [[0.6, 0.6], [0.4, 0.5]]},
    )
    mixed = [pair.mixed(mixer, f"boxes {k}", box) for k, box in enumerate(boxes, start=1)]
    note = f"Shares of the class maps, which need not sum to 1; {{network}}. {LABEL}"
    title = "SnapMix: a box of each image, labels by class maps"
    return Card(title, [*pair.clean(), *heat_pictures(titles, maps), *mixed], note, columns=6)


def transmix(pair: Pair) -> Card:
    chosen = {"lam": SHARE, "center": CENTER}
    cut = pair.mixed(CutMix(prob=1.0), "labels by area", chosen)
    image = torch.from_numpy(cut.image).permute(2, 0, 1)[None].to(pair.x)
    with torch.no_grad():
        likely = pair.net(image).argmax(1)
    maps = _class_maps(pair, image, likely)
    box = share_mask(torch.tensor(CENTER), torch.tensor(SHARE), (image.shape[2], image.shape[3]))
    lam = float(attended_share(maps.cpu(), box, 1 - box.float().mean())[0])
    label = f"{pair.name(0)} {lam:.0%}, {pair.name(1)} {1 - lam:.0%}"
    pictures = [*pair.clean(), cut, *heat_pictures({"attention": "of the mixed image"}, maps)]
    pictures.append(Picture("TransMix", cut.image, label))
    note = (
        "The method reads the attention of a transformer's class token; here the class activation "
        "map of the most likely class stands for it; {network}. " + LABEL
    )
    return Card("TransMix: CutMix with labels by attention", pictures, note)


def tokenmix(pair: Pair) -> Card:
    linear = find_classifier(
        pair.net, CLASSIFIER, pair.layer, clean_map(pair.net, pair.x[:1], pair.layer)
    )

    def all_maps(x: Tensor) -> Tensor:
        features = clean_map(pair.net, x, pair.layer).relu()
        return torch.einsum("bcnm,kc->bknm", features, linear.weight.detach())

    area = TokenMix(grid=8, score="area")
    maps = TokenMix(grid=8, score="maps").with_maps(all_maps)
    pictures = [
        pair.mixed(area, "blocks, by area"),
        pair.mixed(maps, "blocks, by maps"),
        pair.mixed(TokenMix(grid=8, mask="random", score="area"), "random tokens"),
    ]
    note = (
        "8 x 8 tokens, of which 4/7 show the partner. Labels by area, and by class maps of a "
        "teacher, here the network itself; {network}. " + LABEL
    )
    return Card("TokenMix: blocks of tokens of the partner", [*pair.clean(), *pictures], note)


def _class_maps(pair: Pair, x: Tensor, y: Tensor) -> Float[Tensor, "b h w"]:
    """Class activation maps of these labels, at the size of the images."""
    features = clean_map(pair.net, x, pair.layer)
    linear = find_classifier(pair.net, CLASSIFIER, pair.layer, features)
    labels = torch.nn.functional.one_hot(y, linear.out_features).to(features)
    return class_maps(features, linear.weight.detach(), labels, (x.shape[2], x.shape[3]))


def recursivemix(pair: Pair) -> Card:
    """Four steps of batches of one image, each with the step before in it."""
    mixer = RecursiveMix(pair.layer).attach(pair.net, pair.x[:1])
    boxes = [[0.5, 0.35], [0.4, 0.65], [0.65, 0.4], [0.35, 0.35]]
    pictures = []
    for step, (k, center) in enumerate(zip((1, 0, 2, 3), boxes, strict=True), start=1):
        x, y = pair.x[k : k + 1], pair.y[k : k + 1]
        draw = mixer.draw(1, torch.Generator().manual_seed(pair.seed))
        draw = draw.with_tensors({"lam": torch.tensor(SHARE), "center": torch.tensor(center)})
        with recorded(pair.net) as seen:
            targets = mixer.apply(pair.net, x, y, draw).targets
        assert targets is not None
        pictures.append(pair.labeled(f"step {step}", seen.images[0], targets[0]))
    note = f"Batches of one image, a share of {1 - SHARE:.0%} pasted. {LABEL}"
    title = "RecursiveMix: the previous mixed batch is shrunk and pasted"
    return Card(title, pictures, note, columns=4)


LEARNED_NOTE = (
    "The block was trained for {block_steps} steps beside the fixed network, {network}; a run "
    "trains both for all of its epochs. " + LABEL
)


def automix(pair: Pair) -> Card:
    return _pair_learned(pair, AutoMix(), "AutoMix: cross-attention learns the mask")


def samix(pair: Pair) -> Card:
    return _pair_learned(pair, SAMix(), "SAMix: the mask also depends on lam")


def _pair_learned(pair: Pair, mixer: PairLearned, title: str) -> Card:
    """The masks of the pair, of the anchor and of the partner in its place, and both mixes."""
    learned = trained_mixer(pair, mixer)
    x, y, swap = pair.x[:2], pair.y[:2], torch.tensor([1, 0])
    lam = torch.tensor(SHARE)
    size = (x.shape[2], x.shape[3])
    with torch.no_grad(), evaluating(learned.learner):
        h = run_to(learned.learner.teacher, x, learned.layer)
        masks = learned.mask(h, swap.to(x.device), lam, size)[:, 0]
        draw = learned.draw(2, torch.Generator().manual_seed(pair.seed))
        with recorded(pair.net) as seen:
            mixed = learned.apply(pair.net, x, y, draw.with_tensors({"perm": swap, "lam": lam}))
    assert mixed.targets is not None
    titles = ("mixed", "the other way round")
    results = [pair.labeled(*of) for of in zip(titles, seen.images, mixed.targets, strict=True)]
    names = (pair.name(0), pair.name(1))
    shares = [Picture("mask", _gray(m), f"white: {n}") for m, n in zip(masks, names, strict=True)]
    pictures = [*pair.clean(), shares[0], results[0], shares[1], results[1]]
    return Card(title, pictures, LEARNED_NOTE, columns=6)


def adautomix(pair: Pair) -> Card:
    """The masks of three images, which sum to 1, and their mix."""
    learned = trained_mixer(pair, AdAutoMix())
    x, y, size = pair.x[:3], pair.y[:3], (pair.x.shape[2], pair.x.shape[3])
    group, lam = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 0, 1]]), torch.tensor(0.4)
    chosen = {
        "perm": group[1],
        "perms": group[1:].expand(2, 2, 3),
        "others": torch.full((2, 2), 0.5),
        "lam": lam,
    }
    batches: list[Tensor] = []  # clean, mixed by masks, mixed by input mixup
    handle = pair.net.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    with torch.no_grad(), evaluating(learned.learner):
        h = run_to(learned.learner.teacher, x, learned.layer)
        shares = torch.stack([lam, (1 - lam) / 2, (1 - lam) / 2])
        masks = learned.masks(h, group.to(x.device), shares, size)[:, 0, 0]
        draw = learned.draw(3, torch.Generator().manual_seed(pair.seed))
        targets = learned.apply(pair.net, x, y, draw.with_tensors(chosen)).targets
    handle.remove()
    assert targets is not None
    mixed = pair.labeled("mixed", batches[1][0].clamp(0, 1), targets[0])
    gray = [Picture("mask", _gray(mask), f"white: {pair.name(k)}") for k, mask in enumerate(masks)]
    title = "AdAutoMix: learned masks for three images"
    return Card(title, [*pair.clean(3), mixed, *gray], LEARNED_NOTE, columns=4)


def _gray(mask: Float[Tensor, "h w"]) -> Image:
    """A share from 0 to 1 as a picture, black to white."""
    return shown(mask.clamp(0, 1).expand(3, -1, -1))


def trained_mixer(pair: Pair, mixer: AnyLearned) -> AnyLearned:
    """The mixer with its block trained on the images, the network fixed."""
    rng = torch.Generator().manual_seed(pair.seed)
    with torch.random.fork_rng(devices=[]):  # the block's weights are drawn from torch's own
        torch.manual_seed(pair.seed)
        learned = mixer.attach(pair.net, pair.x[:BLOCK_BATCH])
    block = learned.learner.block
    optimizer = torch.optim.Adam(block.parameters(), lr=BLOCK_LR)
    wanted = [p for p in pair.net.parameters() if p.requires_grad]
    try:
        for p in wanted:
            p.requires_grad_(False)
        for step in range(pair.block_steps):
            rows = torch.randint(len(pair.images), (BLOCK_BATCH,), generator=rng).tolist()
            x, y = floats(pair.images, rows).to(pair.x), pair.images.labels[rows].to(pair.y)
            draw = learned.draw(len(x), rng, step / pair.block_steps)
            extra = learned.apply(pair.net, x, y, draw.to(x.device)).extra
            optimizer.zero_grad()
            torch.autograd.backward([extra[name] for name in ("block", "mask") if name in extra])
            optimizer.step()
            if (step + 1) % 10 == 0:
                print(f"{type(mixer).__name__}: step {step + 1}", file=sys.stderr)
    finally:
        for p in wanted:
            p.requires_grad_(True)
    return learned
