"""Cutout (DeVries and Taylor 2017): hide a square of each image; the label stays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import BoxDraw, box_mask
from alignmixup.mixers.checks import check_integers, image_size, require
from alignmixup.mixers.sampling import clean_draw, sample_unit
from alignmixup.ops.blend import channel_values
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class Cutout(Method):
    """Cutout (DeVries and Taylor 2017): hide a square of each image; the label stays.

    The square is centered on any pixel and clipped at the border. The original uses length 16 on
    CIFAR-10 and 8 on CIFAR-100.

    Args:
        length: Side of the square in pixels; an odd length hides one pixel less, as in the
            original.
        fill: Color of the hole in the space of the images, one value per channel: for images in [0,
            1] the mean of the data set, for normalized images 0.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.Cutout(length=16)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    needs_network = False

    length: int = 16
    fill: tuple[float, ...] = (0.5, 0.5, 0.5)
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 2, "length")
        if not isinstance(self.fill, tuple | list) or not all(map(math.isfinite, self.fill)):
            raise ValueError(
                "fill must be a tuple of one number per channel, such as (0.5, 0.5, 0.5), "
                f"got {self.fill!r}"
            )

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        clean = clean_draw(batch_size, rng)
        return BoxDraw("cut", clean.perm, clean.lam, center=sample_unit((batch_size, 2), rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, BoxDraw, self)
        hole = box_mask(draw.center, self.length, self.length, image_size(x))
        images = torch.where(hole.unsqueeze(1), channel_values(self.fill, x), x)
        return self._mixed(net(images), y, draw)
