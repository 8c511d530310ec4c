"""SaliencyMix (Uddin et al. 2021): CutMix with the box on the partner's most salient pixel.

Size of the box, clipping and exact lam as in CutMix; the box is cut from and pasted to the same
place. The saliency is the fine-grained one of ``saliency.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.mixers.boxes import image_size, share_mask, shown_share
from alignmixup.mixers.sampling import (
    check_prob,
    sample_case,
    sample_perm,
    sample_share,
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
from alignmixup.ops.pixels import Scale, check_scale, to_pixels
from alignmixup.ops.saliency import fine_grained_saliency, saliency_peak
from alignmixup.registry import register_mixer

__all__ = ["SaliencyMix"]

Boxes = Literal["first", "per_sample"]
BOXES = ("first", "per_sample")


@register_mixer
@dataclass(frozen=True)
class SaliencyMix(Mixer):
    """SaliencyMix (Uddin et al. 2021): CutMix with the box at the partner's most salient pixel.

    Args:
        alpha: The area of the box is 1 - lam with ``lam`` from Beta(alpha, alpha).
        prob: Probability that a batch is mixed: 0.5 on CIFAR, 1 on ImageNet.
        saliency: ``"first"`` is the authors' code, one box per batch at the peak of the first
            partner; ``"per_sample"`` is the paper, each partner's own peak.
        mean: Channel means your loader normalizes by; None for images in [0, 1].
        std: Channel standard deviations your loader normalizes by; None for images in [0, 1].
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.SaliencyMix(saliency="per_sample")
        mixer(model, x, y).loss().backward()
        ```
    """

    alpha: float = 1.0
    prob: float = 0.5
    saliency: Boxes = "first"
    mean: Scale = None
    std: Scale = None
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_loss(self.loss)
        check_scale(self.mean, self.std)
        check_prob(self.prob)
        if self.saliency not in BOXES:
            raise ValueError(f"unknown saliency {self.saliency!r}; choose from {list(BOXES)}")

    @property
    def cases(self) -> Mapping[str, float]:
        return some_of_the_time("cut", self.prob)

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        case = sample_case(self.cases, rng)
        return Draw(case, sample_perm(batch_size, rng), sample_share(self.alpha, None, rng))

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, ("cut", "clean"))
        if draw.case == "clean":
            return clean_batch(net, x, y, draw, self.loss)
        size = image_size(x)
        centre = self._centre(x, draw.perm)
        box = share_mask(centre, draw.lam, size)
        pasted = torch.where(box.expand(len(x), *size).unsqueeze(1), x[draw.perm], x)
        return mixed_batch(net(pasted), y, draw.perm, shown_share(box), self.loss)

    def _centre(self, x: Tensor, perm: Tensor) -> Tensor:
        """The peak as fractions of the image, (row, column): [2] for the batch or [b, 2]."""
        sources = x[perm[:1]] if self.saliency == "first" else x
        peak = saliency_peak(fine_grained_saliency(to_pixels(sources, self.mean, self.std)))
        # Half a pixel in, so that the fraction falls back on the pixel itself.
        sides = zip(peak.unbind(1), x.shape[2:], strict=True)
        fraction = torch.stack([(at + 0.5) / side for at, side in sides], dim=1)
        return fraction[0] if self.saliency == "first" else fraction[perm]
