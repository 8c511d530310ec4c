"""What ``evaluate`` scores, on which images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.evaluation.forward import (
    ALONE,
    Batches,
    Normalization,
    PixelBatches,
    check_image_batch,
    labeled_pixels,
    model_device,
)
from alignmixup.evaluation.heat import check_boxes
from alignmixup.evaluation.shares import share_of
from alignmixup.training.distributed import Team


@dataclass(frozen=True)
class EvalImages:
    """Images to score on: batches of pixels that can be read again, and what is known of them.

    ``shape`` is that of an image, channels first. ``num_images`` is None if only reading them all
    would tell. ``of`` returns the batches of one process among several; None if only reading all
    images would tell which are its own.
    """

    batches: Batches
    name: str
    shape: tuple[int, int, int]
    num_images: int | None = None
    boxes: Sequence[Tensor] | None = None
    of: Callable[[Team], Batches] | None = None


@dataclass(frozen=True)
class Subject:
    """A model to score on ``images``.

    ``origin`` is stamped on its results and ``settings`` are added to theirs; ``save`` keeps them.
    """

    model: nn.Module
    images: ImageSet | Batches | EvalImages
    origin: Mapping[str, Any] = field(default_factory=dict)
    mixer: Mixer | None = None
    save: Callable[[Sequence[Result]], None] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return model_device(self.model) or torch.device("cpu")


@singledispatch
def import_plugins_of(run: object) -> None:
    """Import the plugins of a run, which may register tasks; any other model has none."""


@singledispatch
def open_subject(
    run: object,
    images: Any,
    data_root: Path | str | None,
    device: str,
    model: nn.Module | None = None,
    team: Team = ALONE,
) -> Subject:
    """Return what to score; ``experiments.scoring`` registers modules, runs and their folders."""
    raise ValueError(f"pass the folder of a run or an nn.Module, got {type(run).__name__}")


def eval_images(
    subject: Subject,
    boxes: Sequence[Tensor] | None,
    normalized_by: Normalization | None,
    batch_size: int,
) -> EvalImages:
    """Return the images as batches of pixels that can be read again."""
    images, device = subject.images, subject.device
    if boxes is not None:
        check_boxes(boxes)
    if isinstance(images, EvalImages):
        return images if boxes is None else replace(images, boxes=boxes)
    if isinstance(images, ImageSet):
        whole = images

        def of(team: Team) -> Batches:
            own = share_of(whole, team)
            return datasets.eval_batches(own, batch_size, device) if len(own) else ()

        known = images.boxes if boxes is None else boxes
        shape = _shape(images.images)
        return EvalImages(of(ALONE), images.name, shape, len(images), known, of)
    if isinstance(images, Iterator):
        raise ValueError("batches are read once for each task: pass a list or a loader")
    first = next(iter(images), None)
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise ValueError("pass an ImageSet or batches (x, y), such as a DataLoader returns")
    check_image_batch(first[0])
    batches: Batches = images
    if normalized_by is not None:
        batches = PixelBatches(lambda: labeled_pixels(images, normalized_by, device))
    return EvalImages(batches, "images", _shape(first[0]), boxes=boxes)


def _shape(images: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = images.shape
    return channels, height, width
