"""The classification table: CIFAR-10, CIFAR-100 and Tiny-ImageNet by network by method.

    alignmixup train cifar10-r18-alignmixup            the paper's schedule
    alignmixup train cifar10-r18-alignmixup-fast       300 epochs, cosine, weight decay 5e-4

Settings of the methods are those of their papers or code for each data set. The loss of the table's
recipes is cross-entropy for all. The paper does not state the loss of its competitors. Manifold
mixup, PuzzleMix and Co-Mixup were published with binary cross-entropy on the softmax, whose
gradient is about 2/K of that of cross-entropy with K classes; ``-bce`` recipes have it:

    alignmixup train cifar10-r18-puzzlemix-bce         the loss the method was published with
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import register_recipe
from alignmixup.training.settings import TrainSettings

# The paper mixes at the network's last map: raw stage 4, or the final BN and ReLU.
NETWORKS: dict[str, tuple[NetSpec, str]] = {
    "r18": (NetSpec("preact_resnet18"), "layer4"),
    "r18-flatten": (NetSpec("preact_resnet18", head="flatten"), "layer4"),
    "wrn16-8": (NetSpec("wrn16_8"), "norm"),
    "wrn16-8-flatten": (NetSpec("wrn16_8", head="flatten"), "norm"),
}

CIFAR = TrainSettings(
    epochs=2000,
    batch_size=128,
    milestones=(500, 1000, 1500),
    eval_every=10,
)
# 128 images on each of two GPUs in the paper; the authors' code has 256.
TINY = dataclasses.replace(CIFAR, epochs=1200, batch_size=256, milestones=(600, 900))
SCHEDULES = {"cifar10": CIFAR, "cifar100": CIFAR, "tiny": TINY}
TABLE = {
    "cifar10": ("r18", "r18-flatten", "wrn16-8", "wrn16-8-flatten"),
    "cifar100": ("r18", "r18-flatten", "wrn16-8", "wrn16-8-flatten"),
    "tiny": ("r18", "r18-flatten"),
}
FLATTENED = (("baseline", ""), ("alignmixup", ""), ("alignmixup", "unaligned"))
MEANS = (0.4914, 0.4822, 0.4465)


@register_recipe
def classification() -> Iterator[Recipe]:
    """Every row of the table, on the paper's schedule and on the short one."""
    for data, networks in TABLE.items():
        for network in networks:
            spec, layer = NETWORKS[network]
            for (method, variant), make in METHODS.items():
                # The table has no flattened head; these recipes are for studying alignment.
                if network.endswith("-flatten") and (method, variant) not in FLATTENED:
                    continue
                key = RecipeKey(data, network, method, variant)
                is_ae = method == "alignmixup-ae"
                net = dataclasses.replace(spec, autoencoder="vector") if is_ae else spec
                recipe = Recipe(key, DataSpec(data), net, make(data, layer), SCHEDULES[data])
                yield from both_schedules(recipe)


def both_schedules(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe, and its ``-fast`` variant with a short schedule."""
    if recipe.net.autoencoder != "none" or recipe.net.head == "flatten":
        # A layer that reads a whole map of raw features has far larger gradients than a pooled
        # head. With AlignMixup/AE on CIFAR-10 the loss went from 2 to NaN within ten steps of the
        # second epoch; clipped at 1 it was stable, and fell faster than clipped at 5.
        clipped = dataclasses.replace(recipe.train, clip_norm=1.0)
        recipe = dataclasses.replace(recipe, train=clipped)
    yield recipe
    yield dataclasses.replace(recipe, key=recipe.key.labeled("fast"), train=short(recipe.train))


def short(settings: TrainSettings) -> TrainSettings:
    """The short schedule: 300 epochs, cosine, weight decay 5e-4."""
    return dataclasses.replace(
        settings, epochs=300, schedule="cosine", milestones=(), weight_decay=5e-4
    )


def _input(data: str, layer: str) -> Mixer:
    # 1 on CIFAR and 0.2 on ImageNet (Zhang et al.); 0.2 on Tiny-ImageNet, as PuzzleMix runs it.
    return InputMixup(alpha=1.0 if "cifar" in data else 0.2)


def _puzzlemix(data: str, layer: str) -> Mixer:
    mixer = PuzzleMix.tiny_imagenet() if data == "tiny" else PuzzleMix()
    return dataclasses.replace(mixer, loss="ce")


def _stylecutmix(data: str, layer: str) -> Mixer:
    # Auto-Gamma, as the authors run it. Their delta is 3 on CIFAR-100; on CIFAR-10 it is 1, which
    # is 1.6 in the units of the small networks trained here (docs/methods/stylemix.md).
    return StyleCutMix(gamma="auto", delta=1.6 if data == "cifar10" else 3.0)


def _with_bce(make: Callable[[str, str], Mixer]) -> Callable[[str, str], Mixer]:
    """The same method with the loss it was published with."""
    return lambda data, layer: dataclasses.replace(make(data, layer), loss="bce")  # type: ignore[type-var]


def _cutout(data: str, layer: str) -> Mixer:
    # 16 and 8 are the original's; it has no Tiny-ImageNet, where 32 hides the same share as 16 on
    # CIFAR-10: our choice.
    return Cutout(length={"cifar10": 16, "cifar100": 8, "tiny": 32}[data], fill=MEANS)


# By method and variant: the mixer for a data set and the layer to mix at.
METHODS: dict[tuple[str, str], Callable[[str, str], Mixer]] = {
    ("baseline", ""): lambda data, layer: NoMix(),
    ("input", ""): _input,
    ("cutout", ""): _cutout,
    ("cutmix", ""): lambda data, layer: CutMix(alpha=1.0, prob=0.5),
    ("manifold", ""): lambda data, layer: ManifoldMixup(alpha=2.0 if "cifar" in data else 0.2),
    ("puzzlemix", ""): _puzzlemix,
    ("comixup", ""): lambda data, layer: CoMixup(loss="ce"),
    ("saliencymix", ""): lambda data, layer: SaliencyMix(),
    # Without weights of their own they train a small AdaIN network first, on the same images.
    ("stylemix", ""): lambda data, layer: StyleMix(),
    ("stylecutmix", ""): _stylecutmix,
    ("alignmixup", ""): lambda data, layer: AlignMixup(layer),
    ("alignmixup-ae", ""): lambda data, layer: AlignMixupAE(),
    ("alignmixup-ae", "unaligned"): lambda data, layer: AlignMixupAE(aligned=False),
    ("alignmixup", "unaligned"): lambda data, layer: AlignMixup(layer, aligned=False),
    ("alignmixup", "released"): lambda data, layer: AlignMixup.released(layer),
}
METHODS |= {
    (name, "bce"): _with_bce(METHODS[name, ""]) for name in ("manifold", "puzzlemix", "comixup")
}
