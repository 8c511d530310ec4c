"""RandAugment and random erasing of one image, as DeiT has them: drawn first, then applied.

RandAugment (Cubuk et al. 2020): ``NUM_OPERATIONS`` operations in a row, each one of ``NAMES`` and
applied with probability 1/2, at a strength of magnitude / 10. The magnitude varies around the one
that is set, with a standard deviation of 0.5. Levels and names follow timm's
``rand-m9-mstd0.5-inc1``: every operation gets stronger with the magnitude.

Random erasing (Zhong et al. 2020): a rectangle of 1/50 to 1/3 of the image becomes noise of the
mean and deviation of the data, clipped to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import UInt8
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

NUM_OPERATIONS = 2
LARGEST_MAGNITUDE = 10.0
DEVIATION = 0.5
ENHANCED = ("Color", "Contrast", "Brightness", "Sharpness")  # as Pillow names them
MOVED = ("ShearX", "ShearY", "TranslateX", "TranslateY")
NAMES = (
    *("AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd", "Rotate"),
    *ENHANCED,
    *MOVED,
)

ERASED_AREA = (0.02, 1 / 3)
LEAST_ASPECT, ATTEMPTS = 0.3, 10

Rgb = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Operation:
    """A change of an image: its name, its strength in [0, 1], and a direction, 1 or -1."""

    name: str
    strength: float
    direction: int


def check_augmentation(rand_augment: float, erasing: float, repeats: int) -> None:
    """Raise a ``ValueError`` for a setting out of range."""
    if not 0 <= rand_augment <= LARGEST_MAGNITUDE:
        raise ValueError(
            f"rand_augment must be a magnitude from 0 (none) to 10, got {rand_augment}"
        )
    if not 0 <= erasing <= 1:
        raise ValueError(f"erasing is a probability and must lie in [0, 1], got {erasing}")
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}")


def draw_operations(magnitude: float, rng: torch.Generator) -> list[Operation]:
    """Draw the operations of one image; each is left out half the time."""
    which = torch.randint(len(NAMES), (NUM_OPERATIONS,), generator=rng).tolist()
    is_applied = (torch.rand(NUM_OPERATIONS, generator=rng) < 0.5).tolist()
    noise = torch.randn(NUM_OPERATIONS, generator=rng, dtype=torch.float64)
    levels = (magnitude + DEVIATION * noise).clamp(0, LARGEST_MAGNITUDE) / LARGEST_MAGNITUDE
    directions = (2 * torch.randint(2, (NUM_OPERATIONS,), generator=rng) - 1).tolist()
    drawn = zip(which, is_applied, levels.tolist(), directions, strict=True)
    return [Operation(NAMES[k], level, sign) for k, applies, level, sign in drawn if applies]


def augment(
    image: UInt8[Tensor, "h w 3"], operations: Sequence[Operation], mean: Rgb
) -> UInt8[Tensor, "h w 3"]:
    """Apply the operations in order; what comes from outside of the image has the mean color."""
    import numpy as np
    from PIL import Image

    fill = tuple(round(255 * level) for level in mean)
    picture = Image.fromarray(image.numpy())
    for operation in operations:
        picture = change(picture, operation, fill)
    return torch.from_numpy(np.array(picture))


def change(image: Image.Image, operation: Operation, fill: tuple[int, ...]) -> Image.Image:
    """Return the image after one operation."""
    from PIL import Image, ImageEnhance, ImageOps

    name, strength = operation.name, operation.strength
    signed = strength * operation.direction
    if name in ENHANCED:
        enhancer = getattr(ImageEnhance, name)(image)
        enhanced: Image.Image = enhancer.enhance(max(0.1, 1.0 + signed * 0.9))
        return enhanced
    if name in MOVED:
        matrix = _matrix(name, signed, image.size)
        affine, bicubic = Image.Transform.AFFINE, Image.Resampling.BICUBIC
        return image.transform(image.size, affine, matrix, bicubic, fillcolor=fill)
    if name == "Rotate":
        return image.rotate(30 * signed, Image.Resampling.BICUBIC, fillcolor=fill)
    if name == "Posterize":
        return ImageOps.posterize(image, max(1, 4 - int(4 * strength)))  # 0 bits would be black
    if name == "Solarize":
        return ImageOps.solarize(image, 256 - int(256 * strength))
    if name == "SolarizeAdd":
        more = int(110 * strength)
        return image.point([min(255, v + more) if v < 128 else v for v in range(256)] * 3)
    if name == "AutoContrast":
        return ImageOps.autocontrast(image)
    return ImageOps.equalize(image) if name == "Equalize" else ImageOps.invert(image)


def _matrix(name: str, signed: float, size: tuple[int, int]) -> tuple[float, ...]:
    """Return the affine map from a pixel of the result to that of the image: x, y, 1 by rows."""
    is_x = name.endswith("X")
    along, across = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    if name.startswith("Shear"):
        shear = 0.3 * signed
        return (*(1.0, shear, 0.0), *across) if is_x else (*along, *(shear, 1.0, 0.0))
    shift = 0.45 * signed * size[0 if is_x else 1]
    return (*(1.0, 0.0, shift), *across) if is_x else (*along, *(0.0, 1.0, shift))


def erase(
    image: UInt8[Tensor, "h w 3"], mean: Rgb, std: Rgb, rng: torch.Generator
) -> UInt8[Tensor, "h w 3"]:
    """Return the image with noise in a rectangle of random area, aspect and place."""
    height, width = image.shape[:2]
    low, high = ERASED_AREA
    for area, aspect, down, right in torch.rand(ATTEMPTS, 4, generator=rng).tolist():
        surface = height * width * (low + (high - low) * area)
        ratio = LEAST_ASPECT ** (1 - 2 * aspect)
        h, w = round(math.sqrt(surface * ratio)), round(math.sqrt(surface / ratio))
        if h < height and w < width:
            top, left = int(down * (height - h + 1)), int(right * (width - w + 1))
            noise = torch.randn(h, w, 3, generator=rng) * torch.tensor(std) + torch.tensor(mean)
            erased = image.clone()
            erased[top : top + h, left : left + w] = (255 * noise).round().clamp(0, 255).byte()
            return erased
    return image
