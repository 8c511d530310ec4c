"""Cutout (DeVries and Taylor 2017): hide a square of each image; the label stays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.mixers.boxes import BoxDraw, box_mask, image_size
from alignmixup.mixers.nomix import clean_draw
from alignmixup.mixers.sampling import sample_unit
from alignmixup.ops.blend import Loss, check_batch, check_case, check_loss, mixed_batch
from alignmixup.registry import register_mixer

__all__ = ["Cutout"]


@register_mixer
@dataclass(frozen=True)
class Cutout(Mixer):
    """Cutout (DeVries and Taylor 2017): hide a square of each image; the label stays.

    The square is centered on any pixel and clipped at the border. The original uses length 16 on
    CIFAR-10 and 8 on CIFAR-100.

    Args:
        length: Side of the square in pixels; an odd length hides one pixel less, as in the
            original.
        fill: Color of the hole in the space of the images, one value per channel: for images in [0,
            1] the mean of the data set, for normalized images 0.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.Cutout(length=16)
        mixer(model, x, y).loss().backward()
        ```
    """

    length: int = 16
    fill: tuple[float, ...] = (0.5, 0.5, 0.5)
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if not isinstance(self.length, int) or self.length < 2:
            raise ValueError(
                f"length must be a whole number of pixels, 2 or more, got {self.length!r}"
            )
        if not isinstance(self.fill, tuple | list) or not all(map(math.isfinite, self.fill)):
            raise ValueError(
                "fill must be a tuple of one number a channel, such as (0.5, 0.5, 0.5), "
                f"got {self.fill!r}"
            )

    @property
    def cases(self) -> Mapping[str, float]:
        return {"cut": 1.0}

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        clean = clean_draw(batch_size, rng)
        return BoxDraw("cut", clean.perm, clean.lam, centre=sample_unit((batch_size, 2), rng))

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, ("cut",))
        if not isinstance(draw, BoxDraw):
            raise ValueError("Cutout needs a draw with a box centre: use its own draw()")
        size = image_size(x)
        if len(self.fill) != x.shape[1]:
            raise ValueError(f"fill has {len(self.fill)} values for {x.shape[1]} channels")
        hole = box_mask(draw.centre, self.length, self.length, size)
        # Value by value: a tensor made from a list would be copied from the host at each step.
        fill = torch.stack([x.new_full((), value) for value in self.fill]).view(1, -1, 1, 1)
        logits = net(torch.where(hole.unsqueeze(1), fill, x))
        return mixed_batch(logits, y, draw.perm, draw.lam, self.loss)
