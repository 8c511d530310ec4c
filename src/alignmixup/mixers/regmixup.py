"""RegMixup (Pinto et al. 2022): mixup near lam = 1/2 as a second loss beside the clean one.

    L = CE(net(x), y) + eta CE(net(x~), t)          x~ = lam x + (1 - lam) x', t likewise

lam ~ Beta(alpha, alpha) with a large alpha. Both batches are one forward pass, so batch norm sees
all 2 b images.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.contracts import Criterion, Draw, Mixed
from alignmixup.mixers.base import LOSSES, Loss, Method
from alignmixup.mixers.checks import check_nonnegative
from alignmixup.mixers.sampling import sample_pairs
from alignmixup.ops.blend import blend, blend_with_partner, check_logits
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class RegMixup(Method):
    """RegMixup (Pinto et al. 2022): the loss of mixed images beside that of clean ones.

    The logits and targets of a step are those of the clean images; the mixed ones are in
    ``Mixed.extra``. A step runs the network on twice as many images.

    Args:
        alpha: ``lam`` is drawn from Beta(alpha, alpha), one per batch: 20 on CIFAR-10, 10 on
            CIFAR-100 and ImageNet.
        eta: Weight of the loss of the mixed images.
        scale: Factor of the whole loss; see ``released``.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.RegMixup(alpha=10.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "beside"

    alpha: float = 10.0
    eta: float = 1.0
    scale: float = 1.0
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative(self, "eta", "scale")

    @classmethod
    def released(cls, alpha: float = 10.0) -> RegMixup:
        """Return the released code, whose loss is the mean over all 2 b images.

        That is half of the paper's formula: for plain SGD, half the learning rate.
        """
        return cls(alpha, scale=0.5)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return sample_pairs(self.cases, self.alpha, False, batch_size, rng)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        logits = net(torch.cat([x, blend_with_partner(x, draw.perm, draw.lam)]))
        is_tensor = isinstance(logits, Tensor)
        clean, mixed = logits.tensor_split(2) if is_tensor else (logits, logits)
        for part in (clean, mixed):
            check_logits(part, len(x))
        rows = self._rows(y, mixed.shape[1])
        targets = blend(rows, rows[draw.perm], draw.lam)
        criterion = scaled(LOSSES[self.loss], self.scale)
        extra = {"mixup": self.eta * criterion(mixed, targets)}
        own = self._mixed(clean, y, draw, torch.ones_like(draw.lam), extra)
        return dataclasses.replace(own, criterion=criterion)


def scaled(criterion: Criterion, scale: float) -> Criterion:
    """Return the criterion times ``scale``."""
    if scale == 1:
        return criterion
    return lambda logits, targets: scale * criterion(logits, targets)
