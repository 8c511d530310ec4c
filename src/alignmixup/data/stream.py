"""Batches of a set that does not fit in memory, decoded by worker processes.

The order of an epoch is a pure function of (seed, epoch) and what is done to an image one of
(seed, epoch, index), so neither depends on how many workers there are or where an epoch is entered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from alignmixup.data.augment import derive_seed, to_float
from alignmixup.data.decode import centre_square, read_rgb
from alignmixup.data.folder import FileSet
from alignmixup.data.loader import Batch, check_start, count_steps

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["StreamLoader"]

ASPECT_RATIOS = (3 / 4, 4 / 3)


class StreamLoader:
    """Batches (x in [0, 1], integer labels) decoded from files, with the interface of DeviceLoader.

    For training, an image is a random part of ``area`` of its surface and of aspect ratio 3/4 to
    4/3, resized, and mirrored half the time. Otherwise (``is_train=False``) files come in order,
    each as the centred square of ``centre`` of its shorter side (224 of 256 by default).
    """

    def __init__(
        self,
        file_set: FileSet,
        batch_size: int,
        image_size: int,
        seed: int,
        num_workers: int = 0,
        device: torch.device | str = "cpu",
        *,
        is_train: bool = True,
        area: tuple[float, float] = (0.08, 1.0),
        flip: bool = True,
        centre: float = 0.875,
        drop_last: bool = False,
        channels_last: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_options(image_size, num_workers, area, centre)
        num_steps = count_steps(len(file_set), batch_size, drop_last)
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.dtype = dtype
        self._order = _Order(len(file_set), batch_size, num_steps, seed, is_train)
        chance = _Chance(seed, area, flip) if is_train else None
        self._loader: DataLoader[object] = DataLoader(
            _Files(file_set, image_size, centre, chance),
            batch_sampler=self._order,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._order.num_steps

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from ``start_step`` on; one epoch at a time."""
        check_start(start_step, len(self))
        self._order.epoch, self._order.start_step = epoch, start_step
        for batch in self._loader:
            if isinstance(batch, str):
                raise ValueError(batch)
            images, labels = batch
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            yield to_float(images, self.dtype, self.channels_last), labels


def _check_options(
    image_size: int, num_workers: int, area: tuple[float, float], centre: float
) -> None:
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size}")
    if num_workers < 0:
        raise ValueError(f"num_workers must be at least 0, got {num_workers}")
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area must hold 0 < low <= high <= 1, got {area}")
    if not 0 < centre <= 1:
        raise ValueError(f"centre must lie in (0, 1], got {centre}")


@dataclass(frozen=True, slots=True)
class _Key:
    """Which image, in which epoch: all that a worker is told."""

    epoch: int
    index: int


class _Order(Sampler[list[_Key]]):
    """The batches of the epoch that is set on it."""

    def __init__(
        self, num_images: int, batch_size: int, num_steps: int, seed: int, is_shuffled: bool
    ) -> None:
        self.num_images = num_images
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.seed = seed
        self.is_shuffled = is_shuffled
        self.epoch = 0
        self.start_step = 0

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[_Key]]:
        epoch, start_step = self.epoch, self.start_step
        order = torch.arange(self.num_images)
        if self.is_shuffled:
            rng = torch.Generator().manual_seed(derive_seed("epoch", self.seed, epoch))
            order = torch.randperm(self.num_images, generator=rng)
        for step in range(start_step, self.num_steps):
            chosen = order[step * self.batch_size : (step + 1) * self.batch_size].tolist()
            yield [_Key(epoch, index) for index in chosen]


@dataclass(frozen=True, slots=True)
class _Chance:
    """What may happen to a training image."""

    seed: int
    area: tuple[float, float]
    flip: bool


class _Files(Dataset[object]):
    """Decodes the file of a key; one that cannot be read gives its error as text.

    An exception raised in a worker would reach the user wrapped in the worker's whole trace.
    """

    def __init__(
        self, file_set: FileSet, image_size: int, centre: float, chance: _Chance | None
    ) -> None:
        # One block of bytes: a tuple of a million strings would be copied into every worker
        # as its reference counts are touched.
        self.paths = np.array([os.fsencode(path) for path in file_set.paths])
        self.labels = file_set.labels
        self.image_size = image_size
        self.centre = centre
        self.chance = chance

    def __getitem__(self, key: _Key) -> tuple[UInt8[Tensor, "s s 3"], Tensor] | str:
        try:
            image = read_rgb(os.fsdecode(self.paths[key.index]))
        except (ValueError, OSError) as error:
            return str(error)
        if self.chance is None:
            square = centre_square(image, self.image_size, self.centre)
        else:
            square = _random_part(image, self.image_size, self.chance, key)
        return torch.from_numpy(np.array(square)), self.labels[key.index]


def _random_part(image: Image.Image, image_size: int, chance: _Chance, key: _Key) -> Image.Image:
    """A random part of the image, resized to a square and perhaps mirrored."""
    from PIL import Image

    rng = torch.Generator().manual_seed(derive_seed("image", chance.seed, key.epoch, key.index))
    shares = torch.rand(_ATTEMPTS, 4, generator=rng, dtype=torch.float64).tolist()
    is_mirrored = bool(torch.randint(0, 2, (), generator=rng)) and chance.flip
    box = _choose_box(image.width, image.height, chance.area, shares)
    part = image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_mirrored else part


_ATTEMPTS = 10


def _choose_box(
    width: int, height: int, area: tuple[float, float], shares: Sequence[Sequence[float]]
) -> tuple[float, float, float, float]:
    """The first box that fits, each made of four numbers in [0, 1): area, ratio, left, top.

    Where none does (a very long image), the centred box nearest to the allowed ratios.
    """
    low, high = math.log(ASPECT_RATIOS[0]), math.log(ASPECT_RATIOS[1])
    for area_share, ratio_share, left_share, top_share in shares:
        surface = width * height * (area[0] + (area[1] - area[0]) * area_share)
        ratio = math.exp(low + (high - low) * ratio_share)
        w, h = round(math.sqrt(surface * ratio)), round(math.sqrt(surface / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int((width - w + 1) * left_share), int((height - h + 1) * top_share)
            return left, top, left + w, top + h
    w = min(width, round(height * ASPECT_RATIOS[1]))
    h = min(height, round(width / ASPECT_RATIOS[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _collate(items: Sequence[object]) -> tuple[Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.stack(labels)
