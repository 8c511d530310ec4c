"""The ImageNet table: ResNet-50 at 224 pixels for 300 epochs, by method.

    alignmixup train imagenet-r50-alignmixup --data DIR

The images must be there: no program can fetch them (``alignmixup data check imagenet`` says how
they must lie). The schedule is that of the paper's text, and what the text leaves to "the training
protocol of" PuzzleMix is that protocol's: random parts of 8 to 100 % of the image, flips, jitter of
the colours by 0.4, lighting of 0.1 and Nesterov momentum in training; 224 pixels from the centre of
256 in evaluation. The table for 100 epochs follows another protocol, of three phases at growing
image sizes, and has no recipes here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from alignmixup.contracts import Mixer
from alignmixup.mixers import CoMixup, CutMix, PuzzleMix, SaliencyMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.classification import METHODS
from alignmixup.recipes.schema import DataSpec, Recipe, Row
from alignmixup.report import paper
from alignmixup.training.settings import TrainSettings

__all__ = ["imagenet"]

IMAGES = DataSpec("imagenet", stream=True, image_size=224, jitter=0.4, lighting=0.1)
NET, LAYER = NetSpec("resnet50"), "layer4"
SCHEDULE = TrainSettings(
    epochs=300,
    # 100 images on each of four GPUs; the authors' code has 1,024 in all.
    batch_size=400,
    lr=0.01,
    classifier_lr=0.1,
    nesterov=True,
    milestones=(100, 200),
    eval_every=10,
)

# The rows of the table, and the unaligned twins of ours.
ROWS = (
    *("baseline", "input", "cutmix", "manifold", "puzzlemix", "comixup", "saliencymix"),
    *("stylemix", "stylecutmix", "alignmixup", "alignmixup-ae"),
    *("alignmixup-unaligned", "alignmixup-ae-unaligned"),
)
# Settings of the methods' own ImageNet runs, where these are not those of the other data.
OWN_SETTINGS: dict[str, Callable[[], Mixer]] = {
    "cutmix": lambda: CutMix(alpha=1.0, prob=1.0),
    "puzzlemix": PuzzleMix.imagenet,
    "comixup": lambda: CoMixup(compat_stride=8, loss="ce"),
    "saliencymix": lambda: SaliencyMix(prob=1.0),
}


def imagenet() -> Iterator[Row]:
    """Every row of the 300-epoch table, on the paper's schedule."""
    for method in ROWS:
        own = OWN_SETTINGS.get(method)
        mixer = own() if own is not None else METHODS[method]("imagenet", LAYER)
        net, train = NET, SCHEDULE
        if "-ae" in method:
            net = dataclasses.replace(NET, autoencoder="vector")
            train = dataclasses.replace(SCHEDULE, classifier="classifier.")
        recipe = Recipe(f"imagenet-r50-{method}", IMAGES, net, mixer, train)
        printed = paper.cell(table="cls-imgnet", method=method, metric="top1_error")
        yield Row(recipe, printed)
