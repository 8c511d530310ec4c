"""DeiT-S on ImageNet for 300 epochs, by method.

    alignmixup train imagenet-deit-s-transmix --data DIR      (pip install 'alignmixup[timm]')

The network is timm's, with DeiT's stochastic depth of 0.1. Augmentation and schedule are DeiT's
(``recipes/transformers.py`` lists what is not taken). All methods have them, so that they differ in
nothing else. TransMix was published with batch 256, weight decay 0.03, 20 epochs of warm-up and an
EMA of the weights; OpenMixup's table is by its own configurations.

``oneof``, ``transmix`` and ``tokenmix`` switch with input mixup and smooth the labels, as their
authors do; the other methods have neither. Manifold mixup and AlignMixup mix after the sixth of
twelve blocks: after the last one the head reads the class token alone, which is not aligned.
TokenMix has the network's own attention instead of a teacher's maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.fmix import FMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.resizemix import ResizeMix
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import Recipe
from alignmixup.recipes.transformers import IMAGES, SCHEDULE
from alignmixup.registry import register_recipe

NET = NetSpec("timm:deit_small_patch16_224", drop_path=0.1)
LAST_BLOCK, MIDDLE_BLOCK = "model.blocks.11", "model.blocks.5"
METHODS: dict[tuple[str, str], Callable[[], Mixer]] = {
    ("baseline", ""): NoMix,
    ("input", ""): lambda: InputMixup(alpha=0.8),
    ("cutmix", ""): lambda: CutMix(alpha=1.0, prob=1.0),
    ("oneof", ""): OneOf.deit,
    ("manifold", ""): lambda: ManifoldMixup(("input", MIDDLE_BLOCK)),
    ("alignmixup", ""): lambda: AlignMixup(MIDDLE_BLOCK),
    ("resizemix", ""): ResizeMix,
    ("fmix", ""): FMix,
    ("attentivemix", "self"): lambda: AttentiveMix(layer=LAST_BLOCK),
    ("transmix", ""): TransMix.released,
    ("transmix", "intended"): TransMix.intended,
    ("tokenmix", ""): TokenMix.released,
    ("automix", ""): lambda: dataclasses.replace(AutoMix.deit(), layer=MIDDLE_BLOCK),
    # Trained as AutoMix is: its own settings for transformers are not known.
    ("samix", ""): lambda: dataclasses.replace(
        SAMix.imagenet(),
        layer=MIDDLE_BLOCK,
        ema_hold=0.25,
        block_lr=1e-3,
        block_min_lr=1e-4,
        block_prob=0.8,
    ),
}


@register_recipe
def deit() -> Iterator[Recipe]:
    """Every method of the table."""
    for (method, variant), make in METHODS.items():
        key = RecipeKey("imagenet", "deit-s", method, variant)
        yield Recipe(key, IMAGES, NET, make(), SCHEDULE)
