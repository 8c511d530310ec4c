"""Augmentation of training images of a detector: mirroring, colors, zoom, crop.

``flip`` is for Faster R-CNN; ``ssd`` is the augmentation of the SSD paper (Liu et al. 2016):
colors, zooming out onto a gray canvas, a crop with a minimum overlap with an object, mirroring.
Each image has its own generator, so that a result depends on nothing else.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

Augmentation = Literal["none", "flip", "ssd"]
Labeled = tuple[Float[Tensor, "3 h w"], Float[Tensor, "k 4"], Int64[Tensor, " k"]]

MIN_OVERLAPS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)  # None: no crop
NUM_TRIALS = 40


def augment(
    image: Float[Tensor, "3 h w"],
    boxes: Float[Tensor, "k 4"],
    labels: Int64[Tensor, " k"],
    kind: Augmentation,
    rng: torch.Generator,
) -> Labeled:
    """Return the augmented image with the boxes that remain in it, at least one."""
    if kind not in ("none", "flip", "ssd"):
        raise ValueError(f"unknown augmentation {kind!r}; choose 'none', 'flip' or 'ssd'")
    if kind == "ssd":
        image = _distort(image, rng)
        if _uniform(rng) < 0.5:
            image, boxes = _zoom_out(image, boxes, rng)
        image, boxes, labels = _crop(image, boxes, labels, rng)
    if kind != "none" and _uniform(rng) < 0.5:
        image, boxes = image.flip(2), _mirrored(boxes, image.shape[2])
    return image, boxes, labels


def _uniform(rng: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))


def _mirrored(boxes: Float[Tensor, "k 4"], width: int) -> Float[Tensor, "k 4"]:
    x0, y0, x1, y1 = boxes.unbind(1)
    return torch.stack([width - x1, y0, width - x0, y1], dim=1)


def _distort(image: Tensor, rng: torch.Generator) -> Tensor:
    """Change brightness, contrast and saturation, each half the time."""
    if _uniform(rng) < 0.5:
        image = image + _uniform(rng, -0.125, 0.125)
    if _uniform(rng) < 0.5:
        image = image * _uniform(rng, 0.5, 1.5)
    if _uniform(rng) < 0.5:
        gray = image.mean(dim=0, keepdim=True)
        image = gray + (image - gray) * _uniform(rng, 0.5, 1.5)
    return image.clamp(0, 1)


def _zoom_out(image: Tensor, boxes: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put the image somewhere on a gray canvas of up to four times its sides."""
    _, h, w = image.shape
    ratio = _uniform(rng, 1, 4)
    canvas = image.new_full((3, int(h * ratio), int(w * ratio)), 0.5)
    top = int(_uniform(rng) * (canvas.shape[1] - h + 1))
    left = int(_uniform(rng) * (canvas.shape[2] - w + 1))
    canvas[:, top : top + h, left : left + w] = image
    return canvas, boxes + boxes.new_tensor([left, top, left, top])


def _crop(image: Tensor, boxes: Tensor, labels: Tensor, rng: torch.Generator) -> Labeled:
    """Crop a part whose overlap with an object is at least the drawn minimum.

    Objects whose center is outside are dropped, the others are clipped.
    """
    _, h, w = image.shape
    while True:
        wanted = MIN_OVERLAPS[int(torch.randint(len(MIN_OVERLAPS), (), generator=rng))]
        if wanted is None:
            return image, boxes, labels
        for _ in range(NUM_TRIALS):
            across, down = int(w * _uniform(rng, 0.3)), int(h * _uniform(rng, 0.3))
            if not (across and down and 0.5 <= across / down <= 2):
                continue
            left, top = int(_uniform(rng) * (w - across + 1)), int(_uniform(rng) * (h - down + 1))
            part = boxes.new_tensor([left, top, left + across, top + down])
            centers = (boxes[:, :2] + boxes[:, 2:]) / 2
            is_in = ((centers > part[:2]) & (centers < part[2:])).all(dim=1)
            if not is_in.any() or _overlaps(boxes[is_in], part).max() < wanted:
                continue
            kept = torch.minimum(
                torch.maximum(boxes[is_in], part[:2].repeat(2)), part[2:].repeat(2)
            )
            image = image[:, top : top + down, left : left + across]
            return image, kept - part[:2].repeat(2), labels[is_in]


def _overlaps(boxes: Float[Tensor, "k 4"], part: Float[Tensor, " 4"]) -> Float[Tensor, " k"]:
    inner = torch.minimum(boxes[:, 2:], part[2:]) - torch.maximum(boxes[:, :2], part[:2])
    both = inner.clamp(min=0).prod(dim=1)
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1) + (part[2:] - part[:2]).prod()
    return both / (sizes - both)
