"""The part of an image that a streamed batch shows; in training a random one, changed at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from alignmixup.datasets.loading.augment import change_colors, derive_seed, draw_colors
from alignmixup.datasets.loading.decode import reduce_scale, to_rgb
from alignmixup.datasets.loading.order import Key
from alignmixup.datasets.loading.rand_augment import Rgb, augment, draw_operations, erase

if TYPE_CHECKING:
    from PIL import Image

ASPECT_RATIOS = (3 / 4, 4 / 3)
ATTEMPTS = 10  # to place a random part

# The part of the shorter side that evaluation shows by default: 224 pixels of 256.
CENTER_FRACTION = 0.875

Box = tuple[float, float, float, float]


def shown_fraction(image_size: int, resize: int | None) -> float:
    """Return the part of the shorter side that is shown of an image resized to ``resize``."""
    return CENTER_FRACTION if resize is None else image_size / resize


@dataclass(frozen=True, slots=True)
class Chance:
    """The random changes of a training image, besides its window."""

    seed: int
    flip: bool
    jitter: float
    lighting: float
    rand_augment: float
    erasing: float
    mean: Rgb
    std: Rgb

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must lie in [0, 1], got {self.jitter}")
        if not self.lighting >= 0:
            raise ValueError(f"lighting must not be negative, got {self.lighting}")

    def generator(self, purpose: str, key: Key) -> torch.Generator:
        """Return the source of randomness of an image for one purpose."""
        copy = (key.copy,) if key.copy else ()
        seed = derive_seed(purpose, self.seed, key.epoch, key.index, *copy)
        return torch.Generator().manual_seed(seed)

    def change(
        self, part: UInt8[Tensor, "s s 3"], key: Key, rng: torch.Generator
    ) -> UInt8[Tensor, "s s 3"]:
        """Change colors, augment and erase, as far as the settings say; ``rng`` is for colors."""
        if self.jitter or self.lighting:
            part = change_colors(part, draw_colors(self.jitter, self.lighting, rng))
        if self.rand_augment:
            operations = draw_operations(self.rand_augment, self.generator("operations", key))
            part = augment(part, operations, self.mean)
        if self.erasing:
            rng = self.generator("erasing", key)
            if float(torch.rand((), generator=rng)) < self.erasing:
                part = erase(part, self.mean, self.std, rng)
        return part


@dataclass(frozen=True, slots=True)
class View:
    """Which part of an image is shown, and at what size; with ``chance`` a random one, changed."""

    image_size: int
    area: tuple[float, float]
    resize: int | None
    squash: bool
    reduced: bool = False
    chance: Chance | None = None

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {self.image_size}")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"area must hold 0 < low <= high <= 1, got {self.area}")
        if self.resize is not None and self.resize < self.image_size:
            raise ValueError(
                f"resize must be at least image_size ({self.image_size}), got {self.resize}"
            )

    def window(self, width: int, height: int, shares: tuple[float, float] | None) -> Box:
        """Return the window in pixels of the image: at the center, or placed by ``shares``.

        Resizing only the window gives the same pixels as resizing the image and cropping it.
        ``shares`` in [0, 1) choose whole pixels of the resized image with equal probability.
        """
        fraction = shown_fraction(self.image_size, self.resize)
        shorter = min(width, height)
        corner = []
        for axis, side in enumerate((width, height)):
            shown = (side if self.squash else shorter) * fraction
            start = (side - shown) / 2
            if shares is not None:
                pixel = shown / self.image_size
                # The epsilon keeps a whole number of pixels from being rounded down.
                slack = int(side / pixel + 1e-6) - self.image_size
                start = int((slack + 1) * shares[axis]) * pixel
            corner.append((start, min(start + shown, side)))
        (left, right), (top, bottom) = corner
        return left, top, right, bottom

    def show(self, image: Image.Image, key: Key) -> UInt8[Tensor, "s s 3"]:
        """Decode the part of an opened image as a square: the center, or the random part of key."""
        if self.chance is None:
            return self._resized(image, self.window(*image.size, None))
        rng = self.chance.generator("image", key)
        shares = torch.rand(ATTEMPTS, 4, generator=rng, dtype=torch.float64).tolist()
        is_mirrored = bool(torch.randint(0, 2, (), generator=rng)) and self.chance.flip
        if self.resize is None:
            box = choose_box(image.width, image.height, self.area, shares)
        else:
            box = self.window(image.width, image.height, (shares[0][2], shares[0][3]))
        part = self._resized(image, box)
        return self.chance.change(part.flip(1) if is_mirrored else part, key, rng)

    def _resized(self, image: Image.Image, box: Box) -> UInt8[Tensor, "s s 3"]:
        from PIL import Image

        size = (self.image_size, self.image_size)
        if self.reduced:
            scale = reduce_scale(image, box, self.image_size)
            box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
        rgb = to_rgb(image)
        return torch.from_numpy(np.array(rgb.resize(size, Image.Resampling.BILINEAR, box=box)))


def choose_box(
    width: int, height: int, area: tuple[float, float], shares: Sequence[Sequence[float]]
) -> Box:
    """Return the first box that fits, from four numbers in [0, 1): area, ratio, left, top.

    If none fits (a very long image), the centered box nearest to the allowed ratios.
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
