"""Parts of a set of images: of chosen ones, and of one process among several.

Process r of R has the images r, r + R, r + 2 R, ...: each one is in one share, and shares may be
uneven.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.evaluation.forward import PixelBatches
from alignmixup.training.distributed import Team

Images = TypeVar("Images", ImageSet, FileSet)


def subset(images: Images, chosen: Int[Tensor, " m"]) -> Images:
    """Return the images of these rows, with their labels and boxes."""
    rows = chosen.tolist()
    kept: dict[str, Any] = {"labels": images.labels[chosen]}
    if isinstance(images, ImageSet):
        kept["images"] = images.images[chosen]
    else:
        kept["paths"] = tuple(images.paths[row] for row in rows)
    boxes: Sequence[Tensor] | None = getattr(images, "boxes", None)
    if boxes is not None:
        kept["boxes"] = tuple(boxes[row] for row in rows)
    return dataclasses.replace(images, **kept)


def share_of(images: Images, team: Team) -> Images:
    """Return the images of one process."""
    if team.size == 1:
        return images
    return subset(images, torch.arange(len(images), device="cpu")[team.rows])


def own_rows(batches: Iterable[Tensor], team: Team) -> PixelBatches:
    """Return the images of one process out of batches of all."""

    def make() -> Iterator[Tensor]:
        before = 0
        for x in batches:
            yield x[(team.rank - before) % team.size :: team.size]
            before += len(x)

    return PixelBatches(make)
