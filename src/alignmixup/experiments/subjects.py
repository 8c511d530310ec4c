"""What is evaluated, and on what: a run's network on its own test images, or a user's on theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer
from alignmixup.datasets.box_lists import boxes_in_view
from alignmixup.datasets.folder import BoxedFileSet, FileSet
from alignmixup.datasets.loading.stream import CENTRE
from alignmixup.evaluation.forward import (
    Batches,
    Normalisation,
    Pixels,
    check_images,
    labelled_pixels,
    model_device,
)
from alignmixup.evaluation.tasks.localization import check_boxes
from alignmixup.experiments.batches import eval_batches, load_split, side_of
from alignmixup.experiments.provenance import origin
from alignmixup.experiments.run import ADAIN, open_run, pick_device
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.recipes.schema import Recipe

__all__ = ["Pictures", "Subject", "open_pictures", "open_subject"]


@dataclass(frozen=True)
class Subject:
    """What is scored, and where its figures belong; ``recipe`` and ``folder`` are a run's."""

    model: nn.Module
    mixer: Mixer | None
    where: dict[str, object]
    recipe: Recipe | None = None
    folder: Path | None = None

    def device(self) -> torch.device:
        return model_device(self.model) or torch.device("cpu")


@dataclass(frozen=True)
class Pictures:
    """What it is scored on: batches of pixels, which the model wants normalised if it says by what.

    ``shape`` is an image's, channels first. ``num_images`` is None where only reading them all
    would tell.
    """

    batches: Batches
    name: str
    shape: tuple[int, int, int]
    num_images: int | None
    boxes: Sequence[Tensor] | None
    normalised_by: Normalisation | None


def open_subject(
    run: Path | str | nn.Module,
    images: ImageSet | Batches | None,
    data_root: Path | str | None,
    device: str,
) -> tuple[Subject, ImageSet | FileSet | Batches]:
    """Return the network on its device, and the images it is scored on: those given or its own."""
    if isinstance(run, nn.Module):
        if images is None:
            raise ValueError("a module is scored on images: pass an ImageSet, or batches (x, y)")
        model = run if device == "auto" else run.to(pick_device(device))
        return Subject(model, None, {"recipe": type(run).__name__}), images
    if not isinstance(run, str | Path):
        raise ValueError(f"pass the folder of a run or an nn.Module, got {type(run).__name__}")
    recipe = read_recipe(Path(run))
    own = load_split(recipe.data, "test", data_root) if images is None else images
    if not isinstance(own, ImageSet | FileSet):
        raise ValueError("a run is scored on an ImageSet, whose classes it must know")
    opened = open_run(run, own.num_classes, side_of(recipe.data, own), device)
    mixer = recipe.mixer
    if isinstance(mixer, StyleMix | StyleCutMix) and not mixer.weights:
        mixer = dataclasses.replace(mixer, weights=str(opened.folder / ADAIN))
    where = origin(recipe, opened.epoch, opened.folder)
    return Subject(opened.net, mixer, where, recipe, opened.folder), own


def open_pictures(
    subject: Subject,
    images: ImageSet | FileSet | Batches,
    boxes: Sequence[Tensor] | None,
    normalised_by: Normalisation | None,
    batch_size: int,
) -> Pictures:
    """Return the images as batches that can be read again, with what is known of them."""
    if normalised_by is not None:
        normalised_by = Pixels.of(normalised_by)
    if boxes is not None:
        check_boxes(boxes)
    if isinstance(images, ImageSet):
        plain = datasets.eval_batches(images, batch_size, subject.device())
        found = images.boxes if boxes is None else boxes
        shape = _shape(images.images)
        return Pictures(plain, images.name, shape, len(images), found, normalised_by)
    if isinstance(images, FileSet):
        assert subject.recipe is not None, "only a run has files"
        return _streamed(subject.recipe, images, subject.device())
    if isinstance(images, Iterator):
        raise ValueError("batches are read once for each task: pass a list or a loader")
    first = next(iter(images), None)
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise ValueError("pass an ImageSet or batches (x, y), such as a DataLoader gives")
    check_images(first[0])
    batches = images
    if normalised_by is not None:
        batches = _Restored(images, normalised_by, subject.device())
    return Pictures(batches, "images", _shape(first[0]), None, boxes, normalised_by)


def _shape(images: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = images.shape
    return channels, height, width


@dataclass(frozen=True)
class _Restored:
    """The pixels of batches that a loader has normalised."""

    batches: Batches
    by: Normalisation
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return labelled_pixels(self.batches, self.by, self.device)


def _streamed(recipe: Recipe, files: FileSet, device: torch.device) -> Pictures:
    """The files of a run that streams them, as its own evaluation shows them."""
    spec = recipe.data
    size = side_of(spec, files)
    boxes = None
    if isinstance(files, BoxedFileSet):
        fraction = CENTRE if spec.eval_resize is None else size / spec.eval_resize
        boxes = boxes_in_view(files.boxes, files.paths, size, fraction, squash=spec.squash)
    batches = eval_batches(spec, recipe.train, files, device)
    return Pictures(batches, files.name, (3, size, size), len(files), boxes, None)
