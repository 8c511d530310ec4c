"""CutMix (Yun et al. 2019): paste a box of the partner into the anchor; labels by area.

w = floor(W sqrt(1 - lam0)), h = floor(H sqrt(1 - lam0)), center uniform, clipped at the border;
lam = 1 - area / (H W), exact after clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignmixup.contracts import Draw
from alignmixup.mixers.base import ImageMethod, Loss
from alignmixup.mixers.boxes import BoxDraw, paste, share_mask, shown_share
from alignmixup.mixers.checks import image_size, require
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class CutMix(ImageMethod):
    """CutMix (Yun et al. 2019): paste a box of the partner into the image; labels by area.

    Args:
        alpha: The area of the box is 1 - lam with ``lam`` from Beta(alpha, alpha).
        prob: Probability that a batch is mixed: 0.5 on CIFAR, 1 on ImageNet.
        correct_lam: Take the share of the labels from the box after clipping at the border; False
            takes it before.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        lam_per_sample: Draw one box per sample instead of one per batch.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.CutMix(alpha=1.0, prob=0.5)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_clean = True

    alpha: float = 1.0
    prob: float = 0.5
    correct_lam: bool = True
    loss: Loss = "ce"
    lam_per_sample: bool = False

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case, boxes = sample_case(self.cases, rng), (batch_size,) if self.lam_per_sample else ()
        lam = sample_share(self.alpha, batch_size if self.lam_per_sample else None, rng)
        perm = sample_perm(batch_size, rng)
        return BoxDraw(case, perm, lam, center=sample_unit((*boxes, 2), rng))

    def mix_images(self, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        draw = require(draw, BoxDraw, self)
        box = share_mask(draw.center, draw.lam, image_size(x))
        lam = shown_share(box) if self.correct_lam else draw.lam
        return paste(x, x[draw.perm], box), lam
