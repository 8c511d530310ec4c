"""Methods that the AlignMixup paper does not compare with, on the data and networks of its table.

    alignmixup train cifar100-r18-fmix           the schedule of the AlignMixup paper
    alignmixup train cifar100-r18-fmix-fast      300 epochs, cosine, weight decay 5e-4
    alignmixup train imagenet-r50-fmix --data DIR       300 epochs, as the paper's ImageNet table
    alignmixup train cub200-r50-snapmix --data DIR      fine-tuning, as SnapMix's authors train

``METHODS`` is the table: a method is one line, with its settings for each data set; ``IMAGENET``
has those with a published figure for ResNet-50. The schedules are those of the other recipes, so
that methods differ in nothing else; what their own papers and OpenMixup published
(``report/others.py``) has other networks and schedules. ``--train.epochs 200`` is 200 epochs of the
fast schedule.

SnapMix is for fine-grained data; its recipe has the schedule of its authors' code: 200 epochs,
batch 16, parts of 448 of 512 pixels, and a rate ten times as high in the classifier. TransMix and
TokenMix need a transformer (``recipes/deit.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.adautomix import AdAutoMix
from alignmixup.mixers.attentivemix import AttentiveMix
from alignmixup.mixers.automix import AutoMix
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.decoupled import Decoupled
from alignmixup.mixers.fmix import FMix
from alignmixup.mixers.gridmix import GridMix
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.multimix import DenseMultiMix, MultiMix
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.recursivemix import RecursiveMix
from alignmixup.mixers.regmixup import RegMixup
from alignmixup.mixers.resizemix import ResizeMix
from alignmixup.mixers.samix import SAMix
from alignmixup.mixers.smoothmix import SmoothMix
from alignmixup.mixers.snapmix import SnapMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes import imagenet
from alignmixup.recipes.classification import NETWORKS, SCHEDULES, both_schedules
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import register_recipe
from alignmixup.training.settings import TrainSettings

NETWORK = "r18"


@dataclass(frozen=True)
class Entry:
    """A method: its mixer for a data set, and training settings in which it differs."""

    make: Callable[[str], Mixer]
    settings: Mapping[str, object] = field(default_factory=dict)


L = TypeVar("L", AutoMix, SAMix, AdAutoMix)


def _learned(kind: type[L], data: str) -> L:
    return kind.tiny_imagenet() if data == "tiny" else kind()


# By method and variant. alpha of RegMixup is the authors' on CIFAR, and that of CIFAR-100 on Tiny.
METHODS: dict[tuple[str, str], Entry] = {
    ("labelsmoothing", ""): Entry(lambda data: LabelSmoothing(NoMix(), 0.1)),
    ("oneof", ""): Entry(lambda data: OneOf.deit()),
    ("resizemix", ""): Entry(lambda data: ResizeMix()),
    ("fmix", ""): Entry(lambda data: FMix()),
    ("fmix", "released"): Entry(lambda data: FMix.released()),
    ("smoothmix", ""): Entry(lambda data: SmoothMix()),
    ("smoothmix", "openmixup"): Entry(lambda data: SmoothMix.openmixup()),
    ("gridmix", ""): Entry(lambda data: GridMix()),
    # The method of that name's paper, which states neither the grid nor the weight.
    ("gridmix", "cells"): Entry(lambda data: GridMix("cells", local_weight=1.0)),
    # Guided by the network itself: the published figures are of a frozen ImageNet network.
    ("attentivemix", "self"): Entry(lambda data: AttentiveMix()),
    ("multimix", ""): Entry(lambda data: MultiMix()),
    ("densemultimix", ""): Entry(lambda data: DenseMultiMix()),
    ("regmixup", ""): Entry(lambda data: RegMixup(alpha=20.0 if data == "cifar10" else 10.0)),
    ("decoupled", ""): Entry(lambda data: Decoupled(InputMixup())),
    ("decoupled", "cutmix"): Entry(lambda data: Decoupled(CutMix())),
    ("recursivemix", ""): Entry(lambda data: RecursiveMix()),
    # OpenMixup ends their schedules at a rate of 0.05 on CIFAR; here all methods have the same.
    ("automix", ""): Entry(lambda data: _learned(AutoMix, data)),
    # The published figures are of two heads.
    ("automix", "heads2"): Entry(
        lambda data: dataclasses.replace(_learned(AutoMix, data), heads=2)
    ),
    ("samix", ""): Entry(lambda data: _learned(SAMix, data)),
    ("adautomix", ""): Entry(lambda data: _learned(AdAutoMix, data)),
    ("adautomix", "heads2"): Entry(
        lambda data: dataclasses.replace(_learned(AdAutoMix, data), heads=2)
    ),
}


# Settings for ImageNet, of methods with a published figure for ResNet-50.
IMAGENET: dict[tuple[str, str], Callable[[], Mixer]] = {
    ("oneof", ""): OneOf.deit,
    ("resizemix", ""): ResizeMix,
    ("fmix", ""): FMix,
    ("smoothmix", ""): SmoothMix,
    ("gridmix", ""): GridMix,
    ("attentivemix", "self"): AttentiveMix,
    ("multimix", ""): MultiMix,
    ("recursivemix", ""): RecursiveMix,
    ("automix", ""): AutoMix.imagenet,
    ("samix", ""): SAMix.imagenet,
    ("adautomix", ""): AdAutoMix.imagenet,
}
BIRDS = DataSpec("cub200", stream=True, image_size=448, resize=512, eval_resize=512)
FINE_TUNING = TrainSettings(
    epochs=200,
    batch_size=16,
    lr=0.001,
    classifier_lr=0.01,
    nesterov=True,
    milestones=(80, 150, 180),
    eval_every=10,
)


@register_recipe
def imagenet_mixups() -> Iterator[Recipe]:
    """Methods with a published figure for ResNet-50, on the paper's 300-epoch schedule."""
    for (method, variant), make in IMAGENET.items():
        key = RecipeKey("imagenet", "r50", method, variant)
        yield Recipe(key, imagenet.IMAGES, imagenet.NET, make(), imagenet.SCHEDULE)


@register_recipe
def snapmix() -> Recipe:
    """Fine-tuning on CUB-200-2011, as its authors do."""
    net = NetSpec("resnet50", pretrained=True)
    return Recipe(RecipeKey("cub200", "r50", "snapmix"), BIRDS, net, SnapMix(), FINE_TUNING)


@register_recipe
def mixups() -> Iterator[Recipe]:
    """Every method of the table on CIFAR-10, CIFAR-100 and Tiny-ImageNet, on both schedules."""
    net, _ = NETWORKS[NETWORK]
    for data, schedule in SCHEDULES.items():
        for (method, variant), entry in METHODS.items():
            key = RecipeKey(data, NETWORK, method, variant)
            train = dataclasses.replace(schedule, **entry.settings)  # type: ignore[arg-type]
            yield from both_schedules(Recipe(key, DataSpec(data), net, entry.make(data), train))
