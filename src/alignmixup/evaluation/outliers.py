"""Out-of-distribution images by name, to compare with the images a model was trained on.

    lsun-crop      LSUN/test, else LSUN or LSUN_C    the central pixels of each file
    lsun-resize    LSUN_resize, else LSUN_R          the centered square of each file, resized
    isun           iSUN                              the same
    tiny-crop      tiny-imagenet-200/val             the central pixels of each image
    tiny-resize    tiny-imagenet-200/val             each image resized
    cifar10        cifar100                          each image, resized if sizes differ
    uniform        gaussian                          noise, as many images as the test set has
    uniform-added  gaussian-added                    the test images with noise added
    folder:PATH    any folder of images              the centered square of each file, resized

The first three are folders of the archives released with ODIN, in the folder of the data sets, with
files at any depth. All sources return pixels in [0, 1] with the height and width of the test
images; if these are not square, the center of a square is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alignmixup import datasets
from alignmixup.datasets.loading.layout import data_root
from alignmixup.evaluation.forward import ALONE, ImageBatches, PixelBatches, pixel_batches
from alignmixup.evaluation.shares import own_rows
from alignmixup.registry import suggestion
from alignmixup.training.distributed import Team

Read = Callable[[int], Iterable[Tensor] | None]
Kind = Literal["uniform", "gaussian"]
BATCH = 500
NOISE_BATCH = 250


@dataclass(frozen=True)
class Outliers:
    """One source, found on disk but not yet decoded.

    ``read(n)`` returns batches of pixels to compare with n test images, or None to skip the source;
    of several processes each gets its share. ``seed`` is that of noise, None if nothing is random.
    """

    name: str
    read: Read
    seed: int | None = None


@dataclass(frozen=True)
class _Wanted:
    shape: tuple[int, int, int]
    seed: int
    root: Path | str | None
    inside: ImageBatches | None
    team: Team = ALONE

    @property
    def size(self) -> tuple[int, int]:
        return self.shape[1:]

    @property
    def side(self) -> int:
        """The side of the smallest square that contains an image of this size."""
        return max(self.size)


def sources_for(dataset: str) -> list[str]:
    """Return what "all" means: every source but the set itself and what shares its classes.

    The two CIFARs are compared only with each other. Noise added to test images is another reading
    of the paper than noise alone, and is never part of "all".
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
    inside: ImageBatches | None = None,
    team: Team = ALONE,
) -> Outliers:
    """Find a source; raise if it is missing or has no image.

    ``shape`` is that of the test images, channels first, and ``inside`` are all of these images as
    pixels, for sources that add noise to them.
    """
    wanted = _Wanted(shape, seed, root, inside, team)
    is_folder, is_noise = name.startswith("folder:"), name.startswith(("uniform", "gaussian"))
    if name not in SOURCES and not is_folder:
        hint = suggestion(name, [*SOURCES, "folder:PATH", "all"])
        raise ValueError(f"unknown out-of-distribution source {name!r}{hint}")
    if shape[0] != 3 and not is_noise:
        raise ValueError(f"{name} has images of 3 channels, the test images have {shape[0]}")
    if is_folder:
        place = name.removeprefix("folder:")
        if not place:
            raise ValueError("'folder:' names no folder; write folder:PATH")
        return Outliers(name, _from_files(datasets.list_images(place), wanted, "resize"))
    return Outliers(name, SOURCES[name](wanted), seed if is_noise else None)


def _from_files(files: Sequence[str], wanted: _Wanted, how: Literal["resize", "crop"]) -> Read:
    own = files[wanted.team.rows]
    if not own:
        return lambda _: iter(())
    return lambda _: _batches(datasets.load_images(own, wanted.side, how), wanted)


def _odin(places: Sequence[str], how: Literal["resize", "crop"], wanted: _Wanted) -> Read:
    root = data_root(wanted.root)
    for place in places:
        if (root / place).is_dir():
            return _from_files(datasets.list_images(root / place), wanted, how)
    raise FileNotFoundError(
        f"no folder {' or '.join(places)} in {root}: unpack the archive released with ODIN there, "
        "or name any folder of images as folder:PATH"
    )


def _tiny(make: Callable[[Tensor, int], Tensor], wanted: _Wanted) -> Read:
    datasets.list_tiny_val(wanted.root)

    def read(_: int) -> Iterator[Tensor]:
        own = datasets.load_tiny_val(wanted.root)[wanted.team.rows]
        return _batches(make(own, wanted.side), wanted)

    return read


def _other(name: str, wanted: _Wanted) -> Read:
    images = datasets.load(name, "test", wanted.root).images
    return lambda _: _batches(resize(images[wanted.team.rows], wanted.side), wanted)


def _batches(images: Tensor, wanted: _Wanted) -> Iterator[Tensor]:
    middle = center_crop(images, wanted.size)
    return (batch.float() / 255 for batch in torch.split(middle, BATCH))


def _noise(kind: Kind, wanted: _Wanted) -> Read:
    return lambda n: own_rows(noise(kind, n, wanted.shape, wanted.seed), wanted.team)


def _added(kind: Kind, wanted: _Wanted) -> Read:
    inside = wanted.inside
    if inside is None:
        raise ValueError(f"{kind}-added needs images to add noise to: pass them as inside=")
    return lambda _: own_rows(noisy_images(inside, kind, wanted.seed), wanted.team)


def noise(kind: Kind, num_images: int, shape: tuple[int, int, int], seed: int) -> PixelBatches:
    """Return images of independent pixels from U(0, 1), or from N(0.5, 0.5) clipped to [0, 1]."""

    def make() -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        for first in range(0, num_images, NOISE_BATCH):
            b = min(NOISE_BATCH, num_images - first)
            yield _draw(kind, (b, *shape), rng).clamp(0, 1)

    return PixelBatches(make)


def noisy_images(batches: ImageBatches, kind: Kind, seed: int) -> PixelBatches:
    """Return images of pixels plus noise, clipped to [0, 1]."""

    def make() -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        for x, _ in pixel_batches(batches, None, device=None):
            yield (x + _draw(kind, tuple(x.shape), rng).to(x)).clamp(0, 1)

    return PixelBatches(make)


def _draw(kind: Kind, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if kind == "uniform":
        return torch.rand(shape, generator=rng, device="cpu")
    return 0.5 + 0.5 * torch.randn(shape, generator=rng, device="cpu")


def center_crop(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Return the central ``size`` x ``size`` pixels of images [n, c, h, w], or height x width."""
    h, w = images.shape[-2:]
    height, width = (size, size) if isinstance(size, int) else size
    if not (1 <= height <= h and 1 <= width <= w):
        raise ValueError(f"cannot crop {height} x {width} pixels from {h} x {w}; resize instead")
    top, left = (h - height) // 2, (w - width) // 2
    return images[..., top : top + height, left : left + width]


def resize(images: Tensor, size: int) -> Tensor:
    """Return images [n, c, h, w] at ``size`` x ``size``, bilinear with antialiasing.

    Bytes are rounded to bytes.
    """
    parts = []
    for part in torch.split(images, 1024):  # in parts, since bytes become floats in between
        wide = part if part.is_floating_point() else part.float()
        small = F.interpolate(wide, (size, size), mode="bilinear", antialias=True)
        parts.append(small if wide is part else small.round().to(part.dtype))
    return torch.cat(parts)


SOURCES: Mapping[str, Callable[[_Wanted], Read]] = {
    "lsun-crop": partial(_odin, ("LSUN/test", "LSUN", "LSUN_C"), "crop"),
    "lsun-resize": partial(_odin, ("LSUN_resize", "LSUN_R"), "resize"),
    "isun": partial(_odin, ("iSUN",), "resize"),
    "tiny-crop": partial(_tiny, center_crop),
    "tiny-resize": partial(_tiny, resize),
    "cifar10": partial(_other, "cifar10"),
    "cifar100": partial(_other, "cifar100"),
    "uniform": partial(_noise, "uniform"),
    "gaussian": partial(_noise, "gaussian"),
    "uniform-added": partial(_added, "uniform"),
    "gaussian-added": partial(_added, "gaussian"),
}
