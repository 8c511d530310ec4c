"""A built-in data set: ten shapes on small images, generated, identical on every machine.

Color, texture, position, size, rotation and background are independent of the class, and their
values are kept (``ShapesTruth``), so that pose and appearance can be measured separately.

The same bits everywhere: randomness is the raw output of PCG64, whose stream numpy guarantees; the
geometry uses only + - * / and comparisons, one array operation at a time, which IEEE arithmetic
rounds identically on every processor (no sin, no matrix product, no float sum); colors are
integers. Image i depends only on (seed, split, i), so a smaller set is the start of a larger one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.loading.layout import SPLITS, check_split
from alignmixup.datasets.silhouettes import COS, NUM_ANGLES, SHAPE_NAMES, SIN, SUBSAMPLES, coverage
from alignmixup.registry import register_dataset

TEXTURE_NAMES = ("flat", "stripes", "checks", "dots", "noise")
DEFAULT_COUNTS = {"train": 5000, "test": 1000}

# Measured on the 5,000 training images at the default size.
MEAN = (0.498, 0.499, 0.498)
STD = (0.263, 0.262, 0.265)


@dataclass(frozen=True)
class ShapesTruth:
    """The values behind each image, in pixels; the center of the first pixel is (0.5, 0.5).

    ``rotation`` is in radians, from x to y (clockwise as seen, since y points down); ``size`` is
    the radius of the circle around the shape. A texture alternates its color with a paler or
    darker one; textures are numbered as in ``TEXTURE_NAMES``.
    """

    masks: Bool[Tensor, "n h w"]
    color: UInt8[Tensor, "n 3"]
    texture: Int64[Tensor, " n"]
    rotation: Float64[Tensor, " n"]
    size: Float64[Tensor, " n"]
    center: Float64[Tensor, "n 2"]
    background_color: UInt8[Tensor, "n 3"]
    background_texture: Int64[Tensor, " n"]


@dataclass(frozen=True)
class ShapesDrawing:
    """A set of shapes and the values behind its images."""

    image_set: ImageSet
    truth: ShapesTruth


def shapes(
    split: str, num_images: int | None = None, image_size: int = 32, seed: int = 0
) -> ImageSet:
    """Draw a set of shapes; 5,000 images for ``train`` and 1,000 for ``test`` by default."""
    return draw_shapes(split, num_images, image_size, seed).image_set


def draw_shapes(
    split: str, num_images: int | None = None, image_size: int = 32, seed: int = 0
) -> ShapesDrawing:
    """Draw a set of shapes and keep its truth; image i is of class i mod 10."""
    check_split(split)
    count = DEFAULT_COUNTS[split] if num_images is None else num_images
    if count < 1:
        raise ValueError(f"num_images must be at least 1, got {count}")
    if image_size < 16:
        raise ValueError(f"image_size must be at least 16 to show a shape, got {image_size}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    scene = _draw_scene(split, count, image_size, seed)
    covered = coverage(scene.labels, scene.center, scene.size, scene.angle, image_size)
    masks = covered * 2 >= SUBSAMPLES * SUBSAMPLES
    images = _paint(scene, covered)
    image_set = ImageSet(
        name="shapes",
        split=split,
        images=torch.from_numpy(images),
        labels=torch.from_numpy(scene.labels),
        class_names=SHAPE_NAMES,
        mean=MEAN,
        std=STD,
        boxes=_tight_boxes(masks),
    )
    return ShapesDrawing(image_set, _truth(scene, masks))


SIZE_RANGE = (0.26, 0.44)  # of the image side
MIN_CONTRAST = 100  # in the channel where object and background differ most
SHADE = 36  # between the two colors of a texture
PIXEL_NOISE = 4  # bits of uniform noise on every value
CELLS = 16  # along a side of the noise texture


@dataclass(frozen=True)
class _Surface:
    """The look of all objects, or of all backgrounds; lengths in 1/32 of the image side."""

    color: NDArray[Any]  # int64 [n, 3]
    texture: NDArray[Any]  # int64 [n]
    angle: NDArray[Any]  # int64 [n], of the texture
    period: NDArray[Any]  # float32 [n]
    phase: NDArray[Any]  # float32 [n]
    cells: NDArray[Any]  # bool [n, CELLS, CELLS], the noise texture


@dataclass(frozen=True)
class _Scene:
    """Everything drawn for n images, before any pixel."""

    labels: NDArray[Any]  # int64 [n]
    size: NDArray[Any]  # float64 [n]
    center: NDArray[Any]  # float64 [n, 2]
    angle: NDArray[Any]  # int64 [n]
    objects: _Surface
    backgrounds: _Surface
    noise: NDArray[Any]  # int16 [n, 3, side, side]


def _draw_scene(split: str, count: int, image_size: int, seed: int) -> _Scene:
    """Draw every image from its own row of raw words."""
    streams = np.random.SeedSequence([seed, SPLITS.index(split)]).spawn(4)
    pose = _words(streams[0], count, 4)
    low, high = SIZE_RANGE
    size = image_size * (low + (high - low) * _share(pose[:, 0]))
    # The circle around the shape stays inside the image, and so does the shape.
    free = image_size - 2 * size
    objects = _draw_surface(streams[1], count)
    backgrounds = _draw_surface(streams[2], count)
    num_values = 3 * image_size * image_size
    speckle = _words(streams[3], count, -(-num_values // 8)).view(np.uint8)[:, :num_values]
    amplitude = 1 << PIXEL_NOISE
    noise = (speckle % amplitude).astype(np.int16) - amplitude // 2
    return _Scene(
        labels=np.arange(count) % len(SHAPE_NAMES),
        size=size,
        center=size[:, None] + free[:, None] * _share(pose[:, 1:3]),
        angle=_choice(pose[:, 3], NUM_ANGLES),
        objects=objects,
        backgrounds=replace(backgrounds, color=_contrasting(objects.color, backgrounds.color)),
        noise=noise.reshape(count, 3, image_size, image_size),
    )


def _words(stream: np.random.SeedSequence, count: int, num_words: int) -> NDArray[Any]:
    """Random words [count, num_words], little-endian, the raw output of PCG64."""
    raw = np.random.PCG64(stream).random_raw(count * num_words)
    return raw.astype("<u8").reshape(count, num_words)


def _share(words: NDArray[Any]) -> NDArray[Any]:
    """A number in [0, 1) from each word."""
    return (words >> np.uint64(11)) * 2.0**-53


def _choice(words: NDArray[Any], num_choices: int) -> NDArray[Any]:
    """An integer in 0..num_choices-1 from each word; the bias is below 1e-6."""
    scaled = (words >> np.uint64(32)) * np.uint64(num_choices)
    return (scaled >> np.uint64(32)).astype(np.int64)


def _draw_surface(stream: np.random.SeedSequence, count: int) -> _Surface:
    words = _words(stream, count, 7 + CELLS * CELLS // 64)
    cells = np.unpackbits(np.ascontiguousarray(words[:, 7:]).view(np.uint8), axis=1)
    return _Surface(
        color=_choice(words[:, :3], 256),
        texture=_choice(words[:, 3], len(TEXTURE_NAMES)),
        angle=_choice(words[:, 4], NUM_ANGLES),
        period=(4 + 4 * _share(words[:, 5])).astype(np.float32),
        phase=_share(words[:, 6]).astype(np.float32),
        cells=cells.reshape(count, CELLS, CELLS).astype(bool),
    )


def _contrasting(color: NDArray[Any], background: NDArray[Any]) -> NDArray[Any]:
    """Replace a background color too similar to its object's."""
    apart = background - color
    is_near = np.abs(apart).max(axis=1, keepdims=True) < MIN_CONTRAST
    # Opposite on each channel's circle of 256 levels, +-25: at least 103 away.
    return np.where(is_near, (color + 128 + apart // 4) % 256, background)


def _paint(scene: _Scene, covered: NDArray[Any]) -> NDArray[Any]:
    """Blend object over background by the share of each pixel covered: uint8 [n, 3, h, w]."""
    full = SUBSAMPLES * SUBSAMPLES
    share = covered[:, None].astype(np.int16)
    images = share * _colors(scene.objects, covered.shape[-1])
    images += (full - share) * _colors(scene.backgrounds, covered.shape[-1])
    images = (images + full // 2) // full + scene.noise
    pixels: NDArray[np.uint8] = images.clip(0, 255).astype(np.uint8)
    return pixels


def _colors(surface: _Surface, image_size: int) -> NDArray[Any]:
    """The surface's color at every pixel: int16 [n, 3, h, w]."""
    first = surface.color
    second = np.where(first < 128, first + SHADE, first - SHADE)
    is_second = _pattern(surface, image_size)[:, None]
    picked = np.where(is_second, second[:, :, None, None], first[:, :, None, None])
    return picked.astype(np.int16)


def _pattern(surface: _Surface, image_size: int) -> NDArray[Any]:
    """Where each texture shows its second color: bool [n, h, w]."""
    line = ((np.arange(image_size) + 0.5) * (32 / image_size)).astype(np.float32)
    is_second = np.zeros((len(surface.texture), image_size, image_size), dtype=bool)
    for texture, name in enumerate(TEXTURE_NAMES):
        (rows,) = np.nonzero(surface.texture == texture)
        if name == "noise":
            cell = np.arange(image_size) * CELLS // image_size
            is_second[rows] = surface.cells[rows][:, cell][:, :, cell]
        elif name != "flat":
            period, phase = surface.period[rows, None], surface.phase[rows, None]
            cos, sin = COS[surface.angle[rows], None], SIN[surface.angle[rows], None]
            a, b = line / period, line / period + phase
            u = (cos * a)[:, None, :] + (sin * b)[:, :, None]
            v = (cos * b)[:, :, None] - (sin * a)[:, None, :]
            is_second[rows] = _periodic(name, u - np.floor(u), v - np.floor(v))
    return is_second


def _periodic(name: str, u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.bool_]:
    """A pattern of period one, from the positions within the period."""
    if name == "stripes":
        return u < 0.5
    if name == "checks":
        return np.logical_xor(u < 0.5, v < 0.5)
    u, v = u - np.float32(0.5), v - np.float32(0.5)
    return u * u + v * v < 0.1  # dots


def _tight_boxes(masks: NDArray[Any]) -> tuple[Tensor, ...]:
    """The smallest box around each mask, as float tensors [1, 4]."""
    has_column: NDArray[np.bool_] = np.any(masks, axis=1)
    has_row: NDArray[np.bool_] = np.any(masks, axis=2)
    side = masks.shape[-1]
    corners = [
        has_column.argmax(axis=1),
        has_row.argmax(axis=1),
        side - has_column[:, ::-1].argmax(axis=1),
        side - has_row[:, ::-1].argmax(axis=1),
    ]
    return torch.from_numpy(np.stack(corners, axis=1)).float().unsqueeze(1).unbind()


def _truth(scene: _Scene, masks: NDArray[Any]) -> ShapesTruth:
    return ShapesTruth(
        masks=torch.from_numpy(masks),
        color=torch.from_numpy(scene.objects.color.astype(np.uint8)),
        texture=torch.from_numpy(scene.objects.texture),
        rotation=torch.from_numpy(scene.angle * (2 * math.pi / NUM_ANGLES)),
        size=torch.from_numpy(scene.size),
        center=torch.from_numpy(scene.center),
        background_color=torch.from_numpy(scene.backgrounds.color.astype(np.uint8)),
        background_texture=torch.from_numpy(scene.backgrounds.texture),
    )


@register_dataset(
    "shapes",
    description="built in: ten shapes drawn on the spot, 5,000 train and 1,000 test images, "
    "32 x 32, with boxes",
    image_size=32,
    num_classes=len(SHAPE_NAMES),
)
def _load_shapes(_root: object, split: str) -> ImageSet:
    return shapes(split)
