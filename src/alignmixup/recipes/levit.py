"""LeViT-128S on ImageNet for 100 epochs, by method (the text of the paper's appendix).

    alignmixup train imagenet-levit-128s-alignmixup --data DIR      (pip install 'alignmixup[timm]')

The network is timm's. The paper states the number of epochs and the layer: features are aligned at
the last layer of the convolutional stem, whose maps are 128 x 14 x 14. Other settings are those of
LeViT's own training (``recipes/transformers.py``), with weight decay 0.025. LeViT's distillation,
label smoothing, EMA of the weights and adaptive clipping are left out, and so is its own mixing,
which is replaced by the methods compared. The batch size, the weight decay of the attention biases
and the layers of manifold mixup (the image and the first two stages) are our choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes import transformers
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import register_recipe

NET, STEM = NetSpec("timm:levit_128s"), "model.stem"
STAGES = ("model.stages.0", "model.stages.1")
SCHEDULE = dataclasses.replace(transformers.SCHEDULE, epochs=100, weight_decay=0.025)
METHODS: dict[tuple[str, str], Callable[[], Mixer]] = {
    ("baseline", ""): NoMix,
    ("input", ""): lambda: InputMixup(alpha=0.2),
    ("manifold", ""): lambda: ManifoldMixup(("input", *STAGES), alpha=0.2),
    ("cutmix", ""): lambda: CutMix(alpha=1.0, prob=1.0),
    ("alignmixup", ""): lambda: AlignMixup(STEM),
    ("alignmixup", "unaligned"): lambda: AlignMixup(STEM, aligned=False),
}


@register_recipe
def levit() -> Iterator[Recipe]:
    """The five rows, and the unaligned twin of ours."""
    for (method, variant), make in METHODS.items():
        key = RecipeKey("imagenet", "levit-128s", method, variant)
        yield Recipe(key, transformers.IMAGES, NET, make(), SCHEDULE)
