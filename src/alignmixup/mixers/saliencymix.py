"""SaliencyMix (Uddin et al. 2021): CutMix with the box on the partner's most salient pixel.

Box size, clipping and exact lam are those of CutMix; the box is pasted where it was cut. The
saliency is the fine-grained one of ``ops/saliency.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import paste, share_mask, shown_share
from alignmixup.mixers.checks import image_size
from alignmixup.mixers.pixels import Scale, to_pixels
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share
from alignmixup.ops.saliency import fine_grained_saliency, saliency_peak
from alignmixup.registry import register_mixer

Boxes = Literal["first", "per_sample"]


@register_mixer
@dataclass(frozen=True)
class SaliencyMix(Method):
    """SaliencyMix (Uddin et al. 2021): CutMix with the box at the partner's most salient pixel.

    Args:
        alpha: The area of the box is 1 - lam with ``lam`` from Beta(alpha, alpha).
        prob: Probability that a batch is mixed: 0.5 on CIFAR, 1 on ImageNet.
        saliency: ``"first"`` is the authors' code, one box per batch at the peak of the first
            partner; ``"per_sample"`` is the paper, each partner's own peak.
        mean: Channel means your loader normalizes by; None for images in [0, 1].
        std: Channel standard deviations your loader normalizes by; None for images in [0, 1].
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.SaliencyMix(saliency="per_sample")
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_clean = True
    needs_network = False

    alpha: float = 1.0
    prob: float = 0.5
    saliency: Boxes = "first"
    mean: Scale = None
    std: Scale = None
    loss: Loss = "ce"

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case = sample_case(self.cases, rng)
        return Draw(case, sample_perm(batch_size, rng), sample_share(self.alpha, None, rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        box = share_mask(self._center(x, draw.perm), draw.lam, image_size(x))
        return self._mixed(net(paste(x, x[draw.perm], box)), y, draw, shown_share(box))

    def _center(self, x: Tensor, perm: Tensor) -> Tensor:
        """Return the peak as fractions of the image, (row, column): [2] or one per sample."""
        sources = x[perm[:1]] if self.saliency == "first" else x
        peak = saliency_peak(fine_grained_saliency(to_pixels(sources, self.mean, self.std)))
        # The middle of the pixel: the fraction times the side rounds down to the same pixel.
        sides = zip(peak.unbind(1), x.shape[2:], strict=True)
        fraction = torch.stack([(at + 0.5) / side for at, side in sides], dim=1)
        return fraction[0] if self.saliency == "first" else fraction[perm]
