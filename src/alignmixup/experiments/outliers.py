"""Out-of-distribution images by name: what to hold against the images a run was trained on.

    lsun-crop      LSUN/test, else LSUN or LSUN_C    the central pixels of each file
    lsun-resize    LSUN_resize, else LSUN_R          the centred square of each file, resized
    isun           iSUN                              the same
    tiny-crop      tiny-imagenet-200/val             the central pixels of each image
    tiny-resize    tiny-imagenet-200/val             each image resized
    cifar10        cifar100                          each image, resized where sizes differ
    uniform        gaussian                          noise, as many images as the run's test set
    uniform-added  gaussian-added                    the run's test images with noise added
    folder:PATH    any folder of images              the centred square of each file, resized

The first three are folders of the archives released with ODIN, in the folder of the data sets;
files lie at any depth in them. All sources give pixels in [0, 1], of the height and width of the
images they are held against: where that is no square, the middle of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from alignmixup import datasets
from alignmixup.datasets.layout import data_root
from alignmixup.evaluation.forward import Batches
from alignmixup.evaluation.tasks import ood

__all__ = ["SOURCES", "Outliers", "find_outliers", "sources_for"]

Read = Callable[[int], Iterable[Tensor]]
BATCH = 500


@dataclass(frozen=True)
class Outliers:
    """One source, found on disk but not yet decoded; ``read(n)`` gives batches of pixels.

    ``seed`` is that of noise, None where there is no chance.
    """

    name: str
    read: Read
    seed: int | None = None


@dataclass(frozen=True)
class _Wanted:
    shape: tuple[int, int, int]
    seed: int
    root: Path | str | None
    inside: Batches | None

    @property
    def size(self) -> tuple[int, int]:
        return self.shape[1:]

    @property
    def side(self) -> int:
        """The side of the square that holds an image of this size."""
        return max(self.size)


def sources_for(dataset: str) -> list[str]:
    """What "all" stands for: every source but the set itself and what shares its classes.

    The two CIFARs are held against each other alone. Noise that is added to test images is another
    reading of the paper than noise alone, and only for who asks for it.
    """
    own = "tiny" if dataset == "imagenet" else dataset
    chosen = [
        name
        for name in SOURCES
        if not name.startswith("cifar") and not name.endswith("-added")
        if name.partition("-")[0] != own
    ]
    other = {"cifar10": "cifar100", "cifar100": "cifar10"}.get(dataset)
    return [*chosen, other] if other else chosen


def find_outliers(
    name: str,
    shape: tuple[int, int, int],
    *,
    seed: int = 0,
    root: Path | str | None = None,
    inside: Batches | None = None,
) -> Outliers:
    """Look for a source; one that is not there, or holds no image, is an error that says where.

    ``shape`` is that of the images it is held against, channels first, and ``inside`` are those
    images, as pixels, for noise to be added to.
    """
    wanted = _Wanted(shape, seed, root, inside)
    is_folder, is_noise = name.startswith("folder:"), name.startswith(("uniform", "gaussian"))
    if name not in SOURCES and not is_folder:
        raise ValueError(
            f"unknown out-of-distribution source {name!r}; there are {', '.join(SOURCES)}, "
            "folder:PATH, and 'all'"
        )
    if shape[0] != 3 and not is_noise:
        raise ValueError(f"{name} has images of 3 channels, where yours have {shape[0]}")
    if is_folder:
        place = name.removeprefix("folder:")
        if not place:
            raise ValueError("'folder:' names no folder; write folder:PATH")
        return Outliers(name, _from_files(datasets.list_images(place), wanted, "resize"))
    return Outliers(name, SOURCES[name](wanted), seed if is_noise else None)


def _from_files(files: Sequence[str], wanted: _Wanted, how: Literal["resize", "crop"]) -> Read:
    return lambda _: _batches(datasets.load_images(files, wanted.side, how), wanted)


def _odin(places: Sequence[str], how: Literal["resize", "crop"], wanted: _Wanted) -> Read:
    root = data_root(wanted.root)
    for place in places:
        if (root / place).is_dir():
            return _from_files(datasets.list_images(root / place), wanted, how)
    looked_for = " or ".join(places)
    raise FileNotFoundError(
        f"no folder {looked_for} in {root}: unpack the archive released with ODIN there, or name "
        "any folder of images as folder:PATH"
    )


def _tiny(make: Callable[[Tensor, int], Tensor], wanted: _Wanted) -> Read:
    datasets.list_tiny_val(wanted.root)
    return lambda _: _batches(make(datasets.load_tiny_val(wanted.root), wanted.side), wanted)


def _other(name: str, wanted: _Wanted) -> Read:
    images = datasets.load(name, "test", wanted.root).images
    return lambda _: _batches(ood.resize(images, wanted.side), wanted)


def _batches(images: Tensor, wanted: _Wanted) -> Iterator[Tensor]:
    middle = ood.centre_crop(images, wanted.size)
    return (batch.float() / 255 for batch in torch.split(middle, BATCH))


def _noise(make: Callable[..., ood.Noise], wanted: _Wanted) -> Read:
    return lambda n: make(n, wanted.size, wanted.seed, channels=wanted.shape[0])


def _added(kind: Literal["uniform", "gaussian"], wanted: _Wanted) -> Read:
    inside = wanted.inside
    if inside is None:
        raise ValueError(f"{kind}-added needs images to add noise to: pass them as inside=")
    return lambda _: ood.noisy_images(inside, kind, wanted.seed)


SOURCES: Mapping[str, Callable[[_Wanted], Read]] = {
    "lsun-crop": partial(_odin, ("LSUN/test", "LSUN", "LSUN_C"), "crop"),
    "lsun-resize": partial(_odin, ("LSUN_resize", "LSUN_R"), "resize"),
    "isun": partial(_odin, ("iSUN",), "resize"),
    "tiny-crop": partial(_tiny, ood.centre_crop),
    "tiny-resize": partial(_tiny, ood.resize),
    "cifar10": partial(_other, "cifar10"),
    "cifar100": partial(_other, "cifar100"),
    "uniform": partial(_noise, ood.uniform_noise),
    "gaussian": partial(_noise, ood.gaussian_noise),
    "uniform-added": partial(_added, "uniform"),
    "gaussian-added": partial(_added, "gaussian"),
}
