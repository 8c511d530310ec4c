"""Figures of evaluations by name: what a network is sure of, and where it looks.

    reliability     accuracy by confidence with the count of each bin, before and after temperature
    localization    class activation maps with the predicted and the true boxes

From a trained run where one is named; else from a small network trained for a moment on the
built-in shapes, which the titles say.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Result
from alignmixup.evaluation.tasks.calibration import Reliability
from alignmixup.evaluation.tasks.localization import LocalizationSettings, localize
from alignmixup.experiments.run import Sets, open_run, train
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.experiments.scoring import evaluate
from alignmixup.figures import drawing_evaluation as drawing
from alignmixup.figures.drawing import save
from alignmixup.figures.gallery import floats, shown
from alignmixup.mixers import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.report.tables import read_results
from alignmixup.training import TrainSettings

__all__ = ["localization", "localized_pictures", "reliability", "reliability_panels"]

EPOCHS = 10
NUM_PICTURES = 8


def reliability(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw the reliability diagram of a run: the figures it recorded, or else measured now."""
    results: Sequence[Result] = []
    if run is not None:
        recipe = read_recipe(run)
        what = f"run {recipe.name}"
        # A run without results has none on disk.
        results = read_results([run]) if (run / "results.jsonl").exists() else []
    if not any(_has_diagram(r) for r in results):
        source = _source(run, seed, data_root)
        what = source.what
        measured = evaluate(
            source.net, source.images, tasks=["calibration", "temperature"], seed=seed
        )
        results = measured.results
    figure = drawing.reliability_diagrams(reliability_panels(results), f"Reliability: {what}")
    return save(figure, out / "reliability")


def reliability_panels(results: Sequence[Result]) -> list[drawing.ReliabilityPanel]:
    """The newest diagram among the results, and that after temperature scaling if there is one."""
    newest: dict[str, Result] = {}
    for result in sorted(results, key=lambda r: r.date):
        if _has_diagram(result):
            newest[result.task] = result
    if not newest:
        raise ValueError("no reliability diagram among the results: evaluate calibration first")
    return [_panel(newest[task]) for task in ("calibration", "temperature") if task in newest]


def _has_diagram(result: Result) -> bool:
    return result.metric == "ece" and "reliability" in result.settings


def _panel(result: Result) -> drawing.ReliabilityPanel:
    bins: Any = result.settings["reliability"]
    # Images that somebody passed are named: they need not be the run's own.
    title = str(result.settings.get("images", f"{result.settings['num_images']} images"))
    if result.task == "temperature":
        title = f"temperature {result.settings['temperature']:.2f}, fitted on other images; {title}"
    oe = 100 * _over_confidence(bins)
    return drawing.ReliabilityPanel(
        title=title,
        edges=tuple(bins["edges"]),
        counts=tuple(bins["counts"]),
        confidence=tuple(bins["confidence"]),
        accuracy=tuple(bins["accuracy"]),
        note=f"ECE {result.value:.2f} %, OE {oe:.2f} %, {len(bins['counts'])} bins",
    )


def _over_confidence(bins: Mapping[str, Any]) -> float:
    return Reliability(**bins).oe


def localization(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw images chosen by ``seed`` with their maps, the boxes found and the true ones."""
    source = _source(run, seed, data_root)
    settings = LocalizationSettings()
    pictures = localized_pictures(source.net, source.images, seed=seed, settings=settings)
    note = (
        "Red: the box of the largest part of the map above "
        f"{settings.cam_threshold:g} of its range; green: true boxes. The map is that of the "
        "predicted class. Images drawn at random."
    )
    title = f"Localisation by class activation maps: {source.what}"
    return save(drawing.localization_grid(pictures, title, note), out / "localization")


def localized_pictures(
    net: nn.Module,
    images: ImageSet,
    *,
    num_pictures: int = NUM_PICTURES,
    seed: int = 0,
    settings: LocalizationSettings | None = None,
) -> list[drawing.LocalizedPicture]:
    """Localise in images drawn at random among those that have a box."""
    boxes = images.boxes or ()
    boxed = [i for i, of_image in enumerate(boxes) if len(of_image)]
    if not boxed:
        raise ValueError(f"{images.name} has no boxes to compare with")
    order = torch.randperm(len(boxed), generator=torch.Generator().manual_seed(seed))
    chosen = [boxed[i] for i in order[:num_pictures].tolist()]
    x = floats(images, chosen)
    found = localize(
        net,
        x,
        images.labels[chosen],
        [boxes[i] for i in chosen],
        settings=settings or LocalizationSettings(),
    )
    pictures = []
    for image, place in zip(x, found, strict=True):
        said, true = images.class_names[place.predicted], images.class_names[place.label]
        pictures.append(
            drawing.LocalizedPicture(
                image=shown(image),
                heat=place.heat / 255,
                box=place.box,
                true_boxes=place.true_boxes,
                iou=place.iou,
                caption=said if said == true else f"{said} (is: {true})",
            )
        )
    return pictures


@dataclass(frozen=True)
class _Source:
    net: nn.Module
    images: ImageSet
    what: str


def _source(run: Path | None, seed: int, data_root: Path | None) -> _Source:
    """The run's network and test images, or a small network and shapes."""
    if run is None:
        return _trained_on_shapes(seed)
    recipe = read_recipe(run)
    images = datasets.load(recipe.data.name, "test", data_root)
    opened = open_run(run, images.num_classes, images.images.shape[-1])
    return _Source(opened.net, images, f"run {recipe.name}, {_epochs(opened.epoch)}")


def _trained_on_shapes(seed: int) -> _Source:
    recipe = Recipe(
        name="shapes-wrn16-8-baseline",
        data=DataSpec("shapes", flip=False),
        # Narrow, for a CPU; its last map is 8 x 8, fine enough for a box.
        net=NetSpec("wrn16_8", width=1),
        mixer=NoMix(),
        train=TrainSettings(
            epochs=EPOCHS,
            batch_size=50,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            milestones=(),
            warmup_epochs=0.5,
            eval_every=EPOCHS,
            seed=seed,
            device="cpu",
        ),
    )
    sets = Sets(datasets.shapes("train"), datasets.shapes("test"))
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, folder, sets=sets)
        size = sets.test.images.shape[-1]
        opened = open_run(folder, sets.test.num_classes, size, device="cpu")
    what = f"a narrow WRN16-8 after {_epochs(EPOCHS)} on shapes"
    return _Source(opened.net, sets.test, what)


def _epochs(count: int) -> str:
    return f"{count} epoch{'' if count == 1 else 's'}"
