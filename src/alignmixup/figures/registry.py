"""Figures by name: what is drawn is computed here, by the package's own solvers and mixers.

    toy                two sets of 16 points in the plane, aligned and interpolated
    methods            one pair of images under every method that mixes images
    cards              a picture of each method by itself, for its card (see cards)
    correspondences    what is matched with what in pairs of images
    effect             what alignment changes, layer by layer
    interpolations     decoded mixes of two images' features (see decoded_figures)
    teaser             one pair under four methods, features decoded (see there, too)
    pose               whether pose follows the kept image (see alignment_figures)
    heads              what alignment changes before pooled and flattened heads, trained
    reliability        accuracy by confidence, with counts (see evaluation_figures)
    localization       class activation maps with predicted and true boxes (see there, too)

From a trained run where one is named; else from the built-in shapes and small networks, untrained
or trained for the figure, which the titles say. ``report.figures`` draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup import datasets, models
from alignmixup.contracts import ImageSet
from alignmixup.evaluation.effect import NEXT_TO_NOTHING, alignment_effect
from alignmixup.experiments.painters import features_at
from alignmixup.experiments.run import open_run
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.figures import drawing as figures
from alignmixup.figures.alignment import heads, pose
from alignmixup.figures.cards import CARD_STEPS, cards as draw_cards
from alignmixup.figures.decoded import interpolations, teaser
from alignmixup.figures.evaluation import localization, reliability
from alignmixup.figures.gallery import (
    ADAIN_STEPS,
    CO_DRAWS,
    CO_OTHERS,
    SHARE,
    different_pairs,
    floats,
    method_pictures,
    shown,
)
from alignmixup.mixers import AlignMixup, AlignMixupAE
from alignmixup.models.preact_resnet import HeadKind
from alignmixup.models.zoo import NetSpec, default_tap
from alignmixup.ops import pairwise_cost, sinkhorn
from alignmixup.ops.align import Keep, align_mix, to_positions

__all__ = [
    "FIGURES",
    "aligned_pair",
    "correspondences",
    "different_pairs",
    "draw_figure",
    "effect",
    "layer_effects",
    "method_pictures",
    "methods",
    "toy",
    "toy_arrays",
]

EPS, NUM_ITERS = 0.1, 100
TOY_POINTS, TOY_ITERS = 16, 1000
TOY_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Plans of more positions than these take minutes on a CPU.
MOST_POSITIONS = 1024
EFFECT_IMAGES = 8


@dataclass(frozen=True)
class Source:
    """Where a figure's network and images come from; ``what`` says it in a title."""

    net: nn.Module
    layer: str
    images: ImageSet
    what: str
    eps: float = EPS
    num_iters: int = NUM_ITERS


def draw_figure(
    name: str,
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
) -> list[Path]:
    """Draw the figure of that name into the folder ``out``; return the files written.

    ``seed`` chooses points, pairs, the chance of the methods and the weights of untrained networks.
    """
    if name not in FIGURES:
        raise ValueError(f"unknown figure {name!r}; there are {', '.join(FIGURES)}")
    if name == "toy":
        if run is not None:
            raise ValueError(f"the figure toy is drawn from points alone: leave out the run {run}")
        return toy(out, seed=seed)
    return FIGURES[name](out, run=run, seed=seed, data_root=data_root)


def toy(out: Path, *, seed: int = 0) -> list[Path]:
    """Draw the toy alignment: cost, assignment, both alignments and the interpolations."""
    title = f"{TOY_POINTS} points in the plane, aligned by entropic optimal transport (eps = {EPS})"
    return figures.save(figures.toy_alignment(toy_arrays(seed), title), out / "toy")


def toy_arrays(seed: int = 0) -> figures.ToyAlignment:
    """Two sets of 16 points, scattered and apart, and everything that alignment makes of them."""
    rng = torch.Generator().manual_seed(seed)
    points = 0.6 * torch.randn(2, TOY_POINTS, 2, generator=rng, dtype=torch.float64)
    points = points + torch.tensor([[[-0.4, -0.2]], [[0.4, 0.2]]], dtype=torch.float64)
    # From left to right, so that neighbours in a matrix are near each other in the plane.
    A, B = (group[group[:, 0].argsort()] for group in points)
    cost = pairwise_cost(A.T, B.T)
    plan = sinkhorn(cost, eps=EPS, num_iters=TOY_ITERS).plan
    both, swap = torch.stack([A, B]), torch.tensor([1, 0])

    def mixed(lam: float, keep: Keep) -> Tensor:
        share = torch.full((2,), lam, dtype=torch.float64)
        return align_mix(both, swap, share, keep=keep, eps=EPS, num_iters=TOY_ITERS)[0]

    return figures.ToyAlignment(
        first=A.numpy(),
        second=B.numpy(),
        cost=cost.numpy(),
        assignment=(TOY_POINTS * plan).numpy(),
        # The far ends: nothing of the kept set is left in them.
        aligned_first=mixed(0.0, "anchor").numpy(),
        aligned_second=mixed(1.0, "partner").numpy(),
        shares=TOY_SHARES,
        keep_first=torch.stack([mixed(lam, "anchor") for lam in TOY_SHARES]).numpy(),
        keep_second=torch.stack([mixed(lam, "partner") for lam in TOY_SHARES]).numpy(),
    )


def methods(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    adain_steps: int = ADAIN_STEPS,
) -> list[Path]:
    """Draw the gallery: one pair of images under every method that mixes images."""
    source = _source(run, seed, data_root)
    pictures = method_pictures(source.net, source.images, seed=seed, adain_steps=adain_steps)
    note = (
        f"Below each image: its soft label. Chosen, not drawn: lam = {SHARE}, CutMix's box, "
        "PuzzleMix's 8 x 8 grid, the shares of style.\n"
        f"Saliency of PuzzleMix and Co-Mixup: {source.what}. Co-Mixup got {CO_OTHERS} "
        "images more than\n"
        f"the pair and {CO_DRAWS} draws; of its outputs the one with most of both is shown. "
        f"Styles: a small AdaIN network after {adain_steps} steps.\n"
        "Manifold mixup and AlignMixup mix features and show no image."
    )
    title = f"One pair of {source.images.name} images under every method"
    return figures.save(figures.gallery(pictures, title, note), out / "methods")


def cards(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    adain_steps: int = CARD_STEPS,
) -> list[Path]:
    """Draw a picture of each method by itself into the folder ``methods``."""
    source = _source(run, seed, data_root)
    return draw_cards(
        out / "methods",
        source.net,
        source.images,
        source.what,
        seed=seed,
        adain_steps=adain_steps,
    )


def correspondences(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    num_pairs: int = 5,
) -> list[Path]:
    """Draw pairs of images with lines between matched positions, and their feature maps."""
    source = _source(run, seed, data_root)
    pairs = [
        aligned_pair(source.net, source.layer, source.images, i, j, source.eps, source.num_iters)
        for i, j in different_pairs(source.images, num_pairs, seed)
    ]
    title = f"Correspondences and features at {source.layer} (first three PCA axes): {source.what}"
    return figures.save(figures.aligned_pairs(pairs, title), out / "correspondences")


@torch.no_grad()
def aligned_pair(
    net: nn.Module,
    layer: str,
    images: ImageSet,
    i: int,
    j: int,
    eps: float = EPS,
    num_iters: int = NUM_ITERS,
) -> figures.AlignedPair:
    """Images i and j, the assignment between their features at ``layer``, and the features."""
    device = next(net.parameters()).device
    x = floats(images, [i, j])
    A = features_at(net, layer, x.to(device)).cpu()
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
    colours = _principal_colours(torch.stack(list(maps.values())))
    pictures = dict(zip(maps, colours, strict=True))
    assignment = (plan[0] * plan.shape[-1]).numpy()
    return figures.AlignedPair(shown(x[0]), shown(x[1]), assignment, pictures)


def _principal_colours(maps: Float[Tensor, "k c h w"]) -> NDArray[np.float32]:
    """Feature maps as pictures [k, h, w, 3]: their first three principal axes."""
    points = maps.permute(0, 2, 3, 1).flatten(0, 2)
    centred = points - points.mean(0)
    _, _, axes = torch.linalg.svd(centred, full_matrices=False)
    scores = centred @ axes[:3].T
    low, high = scores.amin(0), scores.amax(0)
    k, _, h, w = maps.shape
    shown: NDArray[np.float32] = (
        ((scores - low) / (high - low).clamp(min=1e-6)).view(k, h, w, 3).numpy()
    )
    return shown


def effect(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw what alignment changes at each layer, and how far its plans are from matching."""
    if run is not None:
        sources = [_source(run, seed, data_root)]
    else:
        heads: tuple[HeadKind, ...] = ("pool", "flatten")
        sources = [_source(None, seed, None, head=head) for head in heads]
    networks, left_out = {}, []
    for source in sources:
        networks[source.what], skipped = layer_effects(source, seed)
        left_out += [name for name in skipped if name not in left_out]
    note = f"left out, with more than {MOST_POSITIONS} positions: {', '.join(left_out)}"
    figure = figures.effect_by_layer(
        networks,
        f"What alignment changes, by layer ({sources[0].images.name}; dashed: next to nothing)",
        NEXT_TO_NOTHING,
        note if left_out else "",
    )
    return figures.save(figure, out / "effect")


def layer_effects(source: Source, seed: int = 0) -> tuple[list[figures.LayerEffect], list[str]]:
    """The effect at each stage of the network, and the stages too large to measure."""
    stages = [
        name for name, _ in source.net.named_modules() if re.fullmatch(r"(\w+\.)?layer\d", name)
    ]
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(source.images), generator=rng)[:EFFECT_IMAGES].tolist()
    x = floats(source.images, chosen).to(next(source.net.parameters()).device)
    measured, left_out = [], []
    maps: list[Tensor] = []
    for layer in dict.fromkeys([*stages, source.layer]):
        A = features_at(source.net, layer, x[:1])
        if any(torch.equal(A, other) for other in maps):
            continue  # one map by two names, as an autoencoder's encoder and its last stage
        maps.append(A)
        if to_positions(A).shape[1] > MOST_POSITIONS:
            left_out.append(layer)
            continue
        found = alignment_effect(source.net, layer, x, eps=source.eps, num_iters=source.num_iters)
        measured.append(
            figures.LayerEffect(
                layer, found.features, found.pooled, found.logits, found.plan_entropy
            )
        )
    return measured, left_out


def _source(
    run: Path | None, seed: int, data_root: Path | None, *, head: HeadKind = "flatten"
) -> Source:
    """The run's network and test images, or an untrained network and shapes."""
    if run is None:
        images = datasets.shapes("test")
        spec = NetSpec("preact_resnet18", width=8, head=head)
        size = images.images.shape[-1]
        net = models.build(spec, images.num_classes, images.mean, images.std, size, seed=seed)
        what = f"untrained PreActResNet-18, width 8, {head} head"
        return Source(net.eval(), default_tap(spec, net), images, what)
    recipe = read_recipe(run)
    images = datasets.load(recipe.data.name, "test", data_root)
    opened = open_run(run, images.num_classes, images.images.shape[-1])
    what = f"run {recipe.name}, {opened.epoch} epoch{'' if opened.epoch == 1 else 's'}"
    mixer = recipe.mixer
    if isinstance(mixer, AlignMixup | AlignMixupAE):
        return Source(opened.net, mixer.layer, images, what, mixer.eps, mixer.num_iters)
    return Source(opened.net, default_tap(recipe.net, opened.net), images, what)


FIGURES: Mapping[str, Callable[..., list[Path]]] = {
    "toy": toy,
    "methods": methods,
    "correspondences": correspondences,
    "effect": effect,
    "cards": cards,
    "interpolations": interpolations,
    "teaser": teaser,
    "pose": pose,
    "heads": heads,
    "reliability": reliability,
    "localization": localization,
}
