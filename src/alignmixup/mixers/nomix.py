"""No mixing: the baseline of every table, as a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.ops.blend import Loss, check_batch, check_case, check_loss, mixed_batch
from alignmixup.registry import register_mixer

__all__ = ["NoMix", "clean_draw"]


@register_mixer
@dataclass(frozen=True)
class NoMix(Mixer):
    """No mixing: the baseline of every table, as a mixer.

    Args:
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.NoMix()
        mixer(model, x, y).loss().backward()
        ```
    """

    loss: Loss = "ce"

    def __post_init__(self) -> None:
        check_loss(self.loss)

    @property
    def cases(self) -> Mapping[str, float]:
        return {"clean": 1.0}

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        return clean_draw(batch_size, rng)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, ("clean",))
        return mixed_batch(net(x), y, draw.perm, draw.lam, self.loss)


def clean_draw(batch_size: int, rng: torch.Generator) -> Draw:
    """A draw without chance: each sample is its own partner and keeps all of itself."""
    perm = torch.arange(batch_size, device=rng.device)
    return Draw("clean", perm, torch.ones((), device=rng.device))
