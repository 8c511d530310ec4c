"""The two ImageNet tables: ResNet-50 for 300 and for 100 epochs, by method.

    alignmixup train imagenet-r50-alignmixup --data DIR         300 epochs at 224 pixels
    alignmixup train imagenet-r50-alignmixup-100 --data DIR     100 epochs in three phases

The images must be downloaded by hand (``alignmixup data check imagenet`` describes the folder). The
schedule is that of the paper's text. The text refers to PuzzleMix for the rest: random parts of 8
to 100 % of the image, flips, color jitter of 0.4, lighting of 0.1 and Nesterov momentum in
training; the central 224 of 256 pixels in evaluation.

The table for 100 epochs has the protocol of Co-Mixup, which is the "fast" one of PuzzleMix, with
the settings of their published configurations:

    epochs    crop  area from  batch  learning rate, linear in between
    0 - 15    128   0.08       1024   0.5 at 0, 1.0 at 8, 0.125 at 15
    15 - 40   224   0.087      448    0.2 at 15, 0.02 at 40
    40 - 100  224   0.087      448    0.002 at 65, 0.0002 at 90, 0.00002 at 100

with flips as the only other augmentation, plain momentum, no weight decay of norms, and the last
norm of each block zero at the start. PuzzleMix has beta 1.5 and also trains on the clean batch in
the first 40 epochs; Co-Mixup mixes parts of 16 in three iterations. Their code differs in details:
it decays the classifier's bias, reads images that were resized beforehand (to 160 and 352 pixels)
and draws PuzzleMix's partners within quarters of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.classification import METHODS
from alignmixup.recipes.schema import DataSpec, Phase, Recipe
from alignmixup.registry import register_recipe
from alignmixup.training.settings import TrainSettings

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

# The rows of the table, some also without alignment.
ROWS = (
    *("baseline", "input", "cutmix", "manifold", "puzzlemix", "comixup", "saliencymix"),
    *("stylemix", "stylecutmix", "alignmixup", "alignmixup-ae"),
)
ALIGNED = ("alignmixup", "alignmixup-ae")
# Settings of the methods' own ImageNet runs, where these are not those of the other data.
OWN_SETTINGS: dict[str, Callable[[], Mixer]] = {
    "cutmix": lambda: CutMix(alpha=1.0, prob=1.0),
    "puzzlemix": PuzzleMix.imagenet,
    "comixup": lambda: CoMixup(compat_stride=8, loss="ce"),
    "saliencymix": lambda: SaliencyMix(prob=1.0),
}


@register_recipe
def imagenet() -> Iterator[Recipe]:
    """Every row of the 300-epoch table, on the paper's schedule.

    AlignMixup/AE reads a whole map of raw features: its gradient is clipped, as on all other data,
    where it diverges without.
    """
    for key, mixer in _rows(ROWS, OWN_SETTINGS):
        net, train = NET, SCHEDULE
        if key.method == "alignmixup-ae":
            net = dataclasses.replace(NET, autoencoder="vector")
            train = dataclasses.replace(SCHEDULE, classifier="classifier.", clip_norm=1.0)
        yield Recipe(key, IMAGES, net, mixer, train)


def _rows(
    methods: Sequence[str], own_settings: Mapping[str, Callable[[], Mixer]]
) -> Iterator[tuple[RecipeKey, Mixer]]:
    """The key and the mixer of each method, then of the unaligned variants."""
    unaligned = [(method, "unaligned") for method in methods if method in ALIGNED]
    for method, variant in [*((method, "") for method in methods), *unaligned]:
        own = own_settings.get(method)
        mixer = own() if own else METHODS[method, variant]("imagenet", LAYER)
        yield RecipeKey("imagenet", "r50", method, variant), mixer


FAST_IMAGES = DataSpec("imagenet", stream=True, image_size=224, area=(0.087, 1.0))
FAST_NET = NetSpec("resnet50", zero_norms=True)
FAST = dataclasses.replace(
    SCHEDULE,
    epochs=100,
    batch_size=448,
    lr=1.0,
    classifier_lr=None,
    nesterov=False,
    decay_vectors=False,
    schedule="linear",
    milestones=(),
    points=(
        *((0, 0.5), (8, 1.0), (15, 0.125)),
        *((15, 0.2), (40, 0.02)),
        *((65, 0.002), (90, 0.0002), (100, 0.00002)),
    ),
)
SMALL_CROPS: dict[str, object] = {
    "data.image_size": 128,
    "data.area": (0.08, 1.0),
    "train.batch_size": 1024,
}
CLEAN: dict[str, object] = {"mixer.clean_lam": 1.0}
FAST_PHASES: dict[str, tuple[Phase, ...]] = {
    "puzzlemix": (Phase(15, {**SMALL_CROPS, **CLEAN}), Phase(40, CLEAN)),
}
FAST_ROWS = (
    *("baseline", "input", "manifold", "cutmix", "puzzlemix", "comixup", "stylemix"),
    *("stylecutmix", "alignmixup"),
)
# Co-Mixup's configuration names alpha 2, but its code for ImageNet draws from Dirichlet(1).
FAST_SETTINGS: dict[str, Callable[[], Mixer]] = {
    **OWN_SETTINGS,
    "puzzlemix": lambda: dataclasses.replace(PuzzleMix.imagenet(), beta=1.5),
    "comixup": lambda: CoMixup(alpha=1.0, part_size=16, num_iters=3, compat_stride=8, loss="ce"),
}


@register_recipe
def imagenet_100() -> Iterator[Recipe]:
    """Every row of the 100-epoch table and AlignMixup without alignment, in three phases."""
    for key, mixer in _rows(FAST_ROWS, FAST_SETTINGS):
        phases = FAST_PHASES.get(key.method, (Phase(15, SMALL_CROPS),))
        yield Recipe(key.labeled("100"), FAST_IMAGES, FAST_NET, mixer, FAST, phases)
