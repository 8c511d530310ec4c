"""The localisation table: VGG-GAP and ResNet-50, fine-tuned on CUB-200-2011, by method.

    alignmixup train cub200-r50-alignmixup --data DIR
    alignmixup evaluate runs/cub200-r50-alignmixup-seed0 --tasks accuracy localization --data DIR

The images must be there (``alignmixup data check cub200`` says how they must lie), and ImageNet's
weights come from torchvision at first use. Settings are those of the paper's appendix: images
squashed to 256 x 256 and cropped to 224 x 224 in training, squashed to 224 x 224 in evaluation; 600
epochs of SGD at batch 16, a rate that is tenfold in the classifier and falls to a tenth every 150
epochs. ResNet-50 has stride 1 in its last stage, for a map of 14 x 14 (the appendix has the two
strides the wrong way round). No boxes are used in training. Nothing here has been trained by us.

ACoL and ADL are trained by the same schedule; the paper quotes their figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alignmixup.contracts import Mixer
from alignmixup.datasets.layout import IMAGENET_MEAN
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.wsol import ErasingLoss
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe, Row
from alignmixup.report import paper
from alignmixup.training.settings import TrainSettings

__all__ = ["localisation"]

BIRDS = DataSpec("cub200", stream=True, image_size=224, resize=256, eval_resize=224, squash=True)
R50 = TrainSettings(
    epochs=600,
    batch_size=16,
    lr=0.001,
    classifier_lr=0.01,
    milestones=(150, 300, 450),
    eval_every=10,
    # How it is computed, not what.
    precision="bf16",
    channels_last=True,
)
VGG = dataclasses.replace(R50, lr=0.0001, classifier_lr=0.001)

# The name in a recipe, that in the paper's tables, the network, the layer to mix at, the schedule.
NETWORKS = {
    "vgg": ("vgg-gap", NetSpec("vgg_gap", pretrained=True), "conv6", VGG),
    "r50": ("r50", NetSpec("resnet50", last_stride=1, pretrained=True), "layer4", R50),
}


def localisation() -> Iterator[Row]:
    """Every row of the table, the text's Cutout, and the unaligned twin of ours."""
    for network, (printed_name, net, layer, settings) in NETWORKS.items():
        for method, mixer in _mixers(layer).items():
            yield _row(f"cub200-{network}-{method}", net, mixer, settings, printed_name, method)
        adl = dataclasses.replace(net, name={"vgg": "adl_vgg", "r50": "adl_resnet50"}[network])
        yield _row(f"cub200-{network}-adl", adl, NoMix(), settings, printed_name, "adl")
    # On ResNet-50 the table has none. Both branches are new and take the classifier's rate.
    acol = NetSpec("acol_vgg", pretrained=True)
    branches = dataclasses.replace(VGG, classifier="branch_")
    yield _row("cub200-vgg-acol", acol, ErasingLoss(), branches, "vgg-gap", "acol")


def _mixers(layer: str) -> dict[str, Mixer]:
    return {
        "baseline": NoMix(),
        "input": InputMixup(alpha=1.0),
        # Half of the image's side, as 16 is on CIFAR-10; what the paper took is not known.
        "cutout": Cutout(length=112, fill=IMAGENET_MEAN),
        # At every step, as in its authors' ImageNet runs; what the paper took is not known.
        "cutmix": CutMix(alpha=1.0, prob=1.0),
        "alignmixup": AlignMixup(layer),
        "alignmixup-unaligned": AlignMixup(layer, aligned=False),
    }


def _row(
    name: str, net: NetSpec, mixer: Mixer, settings: TrainSettings, network: str, method: str
) -> Row:
    printed = paper.cell(table="wsol", network=network, method=method, metric="top1_loc")
    return Row(Recipe(name, BIRDS, net, mixer, settings), printed)
