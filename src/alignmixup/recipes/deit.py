"""DeiT-S on ImageNet for 300 epochs, by method: the switch of DeiT, TransMix and TokenMix.

    alignmixup train imagenet-deit-s-transmix --data DIR      (pip install 'alignmixup[timm]')

The network is timm's. The schedule is DeiT's own: AdamW, weight decay 0.05 (none of vectors), a
learning rate of 0.0005 for 512 images, five epochs of warm-up, then a cosine to 0.00001. All
methods have it, so that they differ in nothing else; TransMix was published with batch 256, weight
decay 0.03, 20 epochs of warm-up and an EMA of the weights. RandAugment, random erasing, repeated
augmentation and stochastic depth are left out: the published figures are not to be expected.

``oneof``, ``transmix`` and ``tokenmix`` switch with input mixup and smooth the labels, as their
authors do. TokenMix has the network's own attention instead of a teacher's maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.imagenet import IMAGES
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import register_recipe
from alignmixup.training.settings import TrainSettings

NET, LAST_BLOCK = NetSpec("timm:deit_small_patch16_224"), "model.blocks.11"
SCHEDULE = TrainSettings(
    epochs=300,
    batch_size=1024,
    lr=0.001,
    min_lr=0.00001,
    optimizer="adamw",
    weight_decay=0.05,
    decay_vectors=False,
    schedule="cosine",
    milestones=(),
    warmup_epochs=5.0,
    eval_every=10,
)
METHODS: dict[tuple[str, str], Callable[[], Mixer]] = {
    ("baseline", ""): NoMix,
    ("input", ""): lambda: InputMixup(alpha=0.8),
    ("cutmix", ""): lambda: CutMix(alpha=1.0, prob=1.0),
    ("oneof", ""): OneOf.deit,
    ("attentivemix", "self"): lambda: AttentiveMix(layer=LAST_BLOCK),
    ("transmix", ""): TransMix.released,
    ("transmix", "intended"): TransMix.intended,
    ("tokenmix", ""): TokenMix.released,
}


@register_recipe
def deit() -> Iterator[Recipe]:
    """Every method of the table."""
    images = dataclasses.replace(IMAGES, lighting=0.0)
    for (method, variant), make in METHODS.items():
        key = RecipeKey("imagenet", "deit-s", method, variant)
        yield Recipe(key, images, NET, make(), SCHEDULE)
