"""No mixing: the baseline of every table, as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.sampling import CLEAN, clean_draw
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class NoMix(Method):
    """No mixing: the baseline of every table, as a mixer.

    Args:
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.NoMix()
        mixer(model, x, y).loss().backward()
        ```
    """

    needs_network = False

    loss: Loss = "ce"

    @property
    def cases(self) -> Mapping[str, float]:
        return {CLEAN: 1.0}

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return clean_draw(batch_size, rng)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        return self._clean(net, x, y, draw)
