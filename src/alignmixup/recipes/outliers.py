"""Out-of-distribution images by name: what to hold against the images a run was trained on.

    lsun-crop      LSUN/test, else LSUN or LSUN_C    the central pixels of each file
    lsun-resize    LSUN_resize, else LSUN_R          the centred square of each file, resized
    isun           iSUN                              the same
    tiny-crop      tiny-imagenet-200/val             the central pixels of each image
    tiny-resize    tiny-imagenet-200/val             each image resized
    cifar10        cifar100                          each image, resized where sizes differ
    uniform        gaussian                          noise, as many images as the run's test set
    folder:PATH    any folder of images              the centred square of each file, resized

The first three are folders of the archives released with ODIN, in the folder of the data sets;
files lie at any depth in them. All sources give pixels in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from alignmixup import data
from alignmixup.data.layout import data_root
from alignmixup.tasks import ood

__all__ = ["SOURCES", "Outliers", "find_outliers", "sources_for"]

Read = Callable[[int], Iterable[Tensor]]
BATCH = 500


@dataclass(frozen=True)
class Outliers:
    """One source, found on disk but not yet decoded; ``read(n)`` gives batches of pixels."""

    name: str
    read: Read


@dataclass(frozen=True)
class _Wanted:
    size: int
    seed: int
    root: Path | str | None


def sources_for(dataset: str) -> list[str]:
    """What can be held against a data set: every source but the set itself.

    The two CIFARs are held against each other alone.
    """
    chosen = [
        name
        for name in SOURCES
        if not name.startswith("cifar") and name.partition("-")[0] != dataset
    ]
    other = {"cifar10": "cifar100", "cifar100": "cifar10"}.get(dataset)
    return [*chosen, other] if other else chosen


def find_outliers(
    name: str, image_size: int, *, seed: int = 0, root: Path | str | None = None
) -> Outliers:
    """Look for a source; one that is not there, or holds no image, is an error that says where."""
    wanted = _Wanted(image_size, seed, root)
    if name.startswith("folder:"):
        place = name.removeprefix("folder:")
        if not place:
            raise ValueError("'folder:' names no folder; write folder:PATH")
        return Outliers(name, _from_files(data.list_images(place), image_size, "resize"))
    if name not in SOURCES:
        raise ValueError(
            f"unknown out-of-distribution source {name!r}; there are {', '.join(SOURCES)}, "
            "folder:PATH, and 'all'"
        )
    return Outliers(name, SOURCES[name](wanted))


def _from_files(files: Sequence[str], size: int, how: Literal["resize", "crop"]) -> Read:
    return lambda _: _batches(data.load_images(files, size, how))


def _odin(places: Sequence[str], how: Literal["resize", "crop"], wanted: _Wanted) -> Read:
    root = data_root(wanted.root)
    for place in places:
        if (root / place).is_dir():
            return _from_files(data.list_images(root / place), wanted.size, how)
    looked_for = " or ".join(places)
    raise FileNotFoundError(
        f"no folder {looked_for} in {root}: unpack the archive released with ODIN there, or name "
        "any folder of images as folder:PATH"
    )


def _tiny(make: Callable[[Tensor, int], Tensor], wanted: _Wanted) -> Read:
    data.list_tiny_val(wanted.root)
    return lambda _: _batches(make(data.load_tiny_val(wanted.root), wanted.size))


def _other(name: str, wanted: _Wanted) -> Read:
    images = data.load(name, "test", wanted.root).images
    return lambda _: _batches(ood.resize(images, wanted.size))


def _batches(images: Tensor) -> Iterator[Tensor]:
    return (batch.float() / 255 for batch in torch.split(images, BATCH))


SOURCES: Mapping[str, Callable[[_Wanted], Read]] = {
    "lsun-crop": partial(_odin, ("LSUN/test", "LSUN", "LSUN_C"), "crop"),
    "lsun-resize": partial(_odin, ("LSUN_resize", "LSUN_R"), "resize"),
    "isun": partial(_odin, ("iSUN",), "resize"),
    "tiny-crop": partial(_tiny, ood.centre_crop),
    "tiny-resize": partial(_tiny, ood.resize),
    "cifar10": partial(_other, "cifar10"),
    "cifar100": partial(_other, "cifar100"),
    "uniform": lambda w: lambda n: ood.uniform_noise(n, w.size, w.seed),
    "gaussian": lambda w: lambda n: ood.gaussian_noise(n, w.size, w.seed),
}
