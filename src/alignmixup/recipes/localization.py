"""The localization table: VGG-GAP and ResNet-50, fine-tuned on CUB-200-2011, by method.

    alignmixup train cub200-r50-alignmixup --data DIR
    alignmixup evaluate runs/cub200-r50-alignmixup-seed0 --tasks accuracy localization --data DIR

The images must be downloaded by hand (``alignmixup data check cub200`` describes the folder);
ImageNet weights are downloaded from torchvision at first use. Settings are those of the paper's
appendix: images squashed to 256 x 256 and cropped to 224 x 224 in training, squashed to 224 x 224
in evaluation; 600 epochs of SGD with batch size 16; a learning rate ten times as high in the
classifier, divided by ten every 150 epochs. ResNet-50 has stride 1 in its last stage, for a map of
14 x 14 (the appendix swaps the two strides). No boxes are used in training. We have not trained
these recipes.

ACoL and ADL have the same schedule; the paper quotes their figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.datasets.loading.layout import IMAGENET_MEAN
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.wsol import ErasingLoss
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import register_recipe
from alignmixup.training.settings import TrainSettings

BIRDS = DataSpec("cub200", stream=True, image_size=224, resize=256, eval_resize=224, squash=True)
R50 = TrainSettings(
    epochs=600,
    batch_size=16,
    lr=0.001,
    classifier_lr=0.01,
    milestones=(150, 300, 450),
    eval_every=10,
    compile=False,
    capture=False,
)
VGG = dataclasses.replace(R50, lr=0.0001, classifier_lr=0.001)

# The network, that with ADL, the layer to mix at, the schedule.
NETWORKS = {
    "vgg": (NetSpec("vgg_gap", pretrained=True), "adl_vgg", "conv6", VGG),
    "r50": (NetSpec("resnet50", last_stride=1, pretrained=True), "adl_resnet50", "layer4", R50),
}


@register_recipe
def localization() -> Iterator[Recipe]:
    """Every row of the table, the text's Cutout, and AlignMixup without alignment."""
    for network, (net, adl_name, layer, settings) in NETWORKS.items():
        for (method, variant), mixer in _mixers(layer).items():
            key = RecipeKey("cub200", network, method, variant)
            yield Recipe(key, BIRDS, net, mixer, settings)
        adl = dataclasses.replace(net, name=adl_name)
        yield Recipe(RecipeKey("cub200", network, "adl"), BIRDS, adl, NoMix(), settings)
    # The table has no ACoL on ResNet-50. Both branches are new and have the classifier's rate.
    acol = NetSpec("acol_vgg", pretrained=True)
    branches = dataclasses.replace(VGG, classifier="branch_")
    yield Recipe(RecipeKey("cub200", "vgg", "acol"), BIRDS, acol, ErasingLoss(), branches)


def _mixers(layer: str) -> dict[tuple[str, str], Mixer]:
    return {
        ("baseline", ""): NoMix(),
        ("input", ""): InputMixup(alpha=1.0),
        # Half of the image's side, as 16 is on CIFAR-10; the paper's value is not known.
        ("cutout", ""): Cutout(length=112, fill=IMAGENET_MEAN),
        # At every step, as in its authors' ImageNet runs; the paper's value is not known.
        ("cutmix", ""): CutMix(alpha=1.0, prob=1.0),
        ("alignmixup", ""): AlignMixup(layer),
        ("alignmixup", "unaligned"): AlignMixup(layer, aligned=False),
    }
