"""Input mixup (Zhang et al. 2018): interpolate two images and their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alignmixup.contracts import Draw
from alignmixup.mixers.base import ImageMethod, Loss
from alignmixup.mixers.sampling import sample_pairs
from alignmixup.ops.blend import blend_with_partner
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class InputMixup(ImageMethod):
    """Input mixup (Zhang et al. 2018): interpolate two images and their labels.

    Args:
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        lam_per_sample: Draw one ``lam`` per sample instead of one per batch.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.InputMixup(alpha=1.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "input"

    alpha: float = 1.0
    lam_per_sample: bool = False
    loss: Loss = "ce"

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return sample_pairs(self.cases, self.alpha, self.lam_per_sample, batch_size, rng)

    def mix_images(self, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        return blend_with_partner(x, draw.perm, draw.lam), draw.lam
