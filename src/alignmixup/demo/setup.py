"""What the demo trains, and on what.

Four of the built-in shapes, so few images that a network without mixing memorizes them, and no
other augmentation: with random crops as well there is little left for mixing to add.
The head is flattened and features are mixed before the last stages, so that alignment reaches the
logits (before a pooled head it would change nothing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer, RecipeKey, Result
from alignmixup.evaluation.outliers import Outliers
from alignmixup.evaluation.tasks.ood import ood
from alignmixup.experiments.built_in import small_recipe
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.decoding import DecoderSettings
from alignmixup.experiments.load import Run, load_run
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import append_results
from alignmixup.experiments.scoring import evaluate
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.report.reading import read_results

CLASSES = ("disc", "ring", "cross", "bar")
DATA, UNSEEN = "few_shapes", "unseen_shapes"
LAYER = "layer2"  # 8 x 8 positions
FGSM_EPS = 1 / 255
DECODER = DecoderSettings(LAYER, epochs=5, batch_size=50, lr=3e-3)


@dataclass(frozen=True)
class Size:
    """How much the demo trains; the defaults take a minute and a half on two cores."""

    epochs: int = 12
    num_train: int = 1500
    num_test: int = 500
    batch_size: int = 50
    seed: int = 0


# The methods by their names on the page, with the names in their keys; the first is the baseline.
METHODS: dict[str, tuple[str, Mixer]] = {
    "no mixing": ("baseline", NoMix()),
    "input mixup": ("input", InputMixup()),
    "AlignMixup": ("alignmixup", AlignMixup(LAYER)),
}


def few_shapes(split: str, num_images: int) -> ImageSet:
    """The first images of the four classes among the built-in shapes."""
    return _of_classes(split, num_images, CLASSES, DATA)


def unseen_shapes(num_images: int) -> ImageSet:
    """Test images of the other six shapes, which no network of the demo was trained on."""
    others = tuple(name for name in datasets.SHAPE_NAMES if name not in CLASSES)
    return _of_classes("test", num_images, others, UNSEEN)


def _of_classes(split: str, num_images: int, classes: tuple[str, ...], name: str) -> ImageSet:
    total = len(datasets.SHAPE_NAMES)
    # Image i is of class i mod 10.
    drawn = datasets.shapes(split, -(-num_images // len(classes)) * total)
    wanted = torch.tensor([datasets.SHAPE_NAMES.index(each) for each in classes])
    (rows,) = torch.where(torch.isin(drawn.labels, wanted))
    rows = rows[:num_images]
    labels = (drawn.labels[rows, None] == wanted).long().argmax(1)
    boxes = None if drawn.boxes is None else tuple(drawn.boxes[i] for i in rows.tolist())
    return dataclasses.replace(
        drawn, name=name, images=drawn.images[rows], labels=labels, class_names=classes, boxes=boxes
    )


def sets_of(size: Size) -> Sets:
    """The images that all networks of the demo are trained and tested on."""
    return Sets(few_shapes("train", size.num_train), few_shapes("test", size.num_test))


def recipe(method: str, mixer: Mixer, size: Size) -> Recipe:
    """Return the recipe of one network of the demo, small enough for two cores."""
    key = RecipeKey(DATA, "r18-flatten", method, "demo")
    net = NetSpec("preact_resnet18", width=16, head="flatten", stem_stride=2)
    small = small_recipe(key, net, mixer, size.epochs, size.seed)
    warmup = min(1.5, size.epochs / 2)
    settings = dataclasses.replace(
        small.train, batch_size=size.batch_size, warmup_epochs=warmup, clip_norm=1.0
    )
    data = DataSpec(DATA, flip=False, pad=0)  # no augmentation but the mixing
    return dataclasses.replace(small, data=data, train=settings)


TASKS = ("accuracy", "calibration", "fgsm")


def score(folder: Path, sets: Sets) -> list[Result]:
    """Score a finished run, once: results that are there are read."""
    if not any(r.task == "ood" for r in read_results([folder])):
        run = load_run(folder, device="cpu")
        options = {"fgsm": {"eps": FGSM_EPS}}
        evaluate(run, sets.test, tasks=TASKS, options=options, device="cpu")
        append_results(folder, _ood_results(run, sets.test))
    return list(read_results([folder]))


def _ood_results(run: Run, inside: ImageSet) -> list[Result]:
    outside = unseen_shapes(len(inside))
    sources = [Outliers(outside.name, lambda _: _batches(outside))]
    results = ood(run.model, list(_batches(inside)), sources)
    where = {**origin(run.recipe, run.epoch, run.folder), **provenance(torch.device("cpu"))}
    return [result.stamped(**where) for result in results]


def _batches(images: ImageSet) -> Iterable[Tensor]:
    return [part.float() / 255 for part in torch.split(images.images, 250)]
