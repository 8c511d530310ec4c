"""CutMix (Yun et al. 2019): paste a box of the partner into the anchor; labels by area.

w = floor(W sqrt(1 - lam0)), h = floor(H sqrt(1 - lam0)), centre uniform, clipped at the border;
lam = 1 - area / (H W), exact after clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.mixers.boxes import BoxDraw, image_size, share_mask, shown_share
from alignmixup.mixers.sampling import (
    check_prob,
    sample_case,
    sample_perm,
    sample_share,
    sample_unit,
    some_of_the_time,
)
from alignmixup.ops.blend import (
    Loss,
    check_alpha,
    check_batch,
    check_case,
    check_loss,
    clean_batch,
    mixed_batch,
)
from alignmixup.registry import register_mixer

__all__ = ["CutMix"]


@register_mixer
@dataclass(frozen=True)
class CutMix(Mixer):
    """CutMix (Yun et al. 2019): paste a box of the partner into the image; labels by area.

    There is one box per batch.

    Args:
        alpha: The area of the box is 1 - lam with ``lam`` from Beta(alpha, alpha).
        prob: Probability that a batch is mixed: 0.5 on CIFAR, 1 on ImageNet.
        correct_lam: Take the share of the labels from the box after clipping at the border; False
            takes it before.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.CutMix(alpha=1.0, prob=0.5)
        mixer(model, x, y).loss().backward()
        ```
    """

    alpha: float = 1.0
    prob: float = 0.5
    correct_lam: bool = True
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_loss(self.loss)
        check_prob(self.prob)

    @property
    def cases(self) -> Mapping[str, float]:
        return some_of_the_time("cut", self.prob)

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        case = sample_case(self.cases, rng)
        lam = sample_share(self.alpha, None, rng)
        return BoxDraw(case, sample_perm(batch_size, rng), lam, centre=sample_unit((2,), rng))

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, ("cut", "clean"))
        if draw.case == "clean":
            return clean_batch(net, x, y, draw, self.loss)
        if not isinstance(draw, BoxDraw):
            raise ValueError("CutMix needs a draw with a box centre: use its own draw()")
        size = image_size(x)
        box = share_mask(draw.centre, draw.lam, size)
        pasted = torch.where(box.expand(len(x), *size).unsqueeze(1), x[draw.perm], x)
        lam = shown_share(box) if self.correct_lam else draw.lam
        return mixed_batch(net(pasted), y, draw.perm, lam, self.loss)
