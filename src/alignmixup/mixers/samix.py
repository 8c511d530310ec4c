"""SAMix (Li et al. 2021): AutoMix with a block that sees both images, and a mask of more variance.

h <- h (1 + g), h' <- h' (2 - g),  g = (4/3 lam^3 - 2 lam^2 + k lam) / (k - 2/3)
q = Wq [h; h'], k = Wk [h; h'], v = MLP(h')
s' = sigmoid(up(softmax(q' k / sqrt(d)) v)), m = 1 - s'
mask loss = w (max(0, |mean m - lam| - margin) - 2 Var m)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.mixers.automix import PairLearned
from alignmixup.mixers.learned import attend, check_unit, conv1x1, upsampled
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class SAMix(PairLearned):
    """SAMix (Li et al. 2021): AutoMix with a block that sees both images, by the released code.

    Training is that of AutoMix: a teacher, a clean and a mixed batch. The released code's weight of
    a global loss has no effect (it multiplies terms of labels that are 0), so there is none here.

    Args:
        layer: Layer of the teacher that the block reads, by default stage 3: maps
            ``[b, c, h, w]``, or tokens of a square grid.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        switch: Where the smaller share is at most this, the network gets input mixup.
        ema: Momentum of the teacher at the start and at the end of training.
        ema_hold: Share of training in which it stays at the first; then it follows a cosine.
        block_lr: Learning rate of the block; None: the network's.
        block_min_lr: Where that ends; None: as the network's.
        block_momentum: Momentum of the block; None: the network's.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.
        mask_weight: Weight of the loss of the mask: its mean near ``lam``, its variance large.
        mask_margin: Distance from ``lam`` that costs nothing.
        mask_decay: Let this weight fall to 0 by a cosine.
        block_prob: Probability that a step trains the block.
        curve: k above, at least 1 (1.25 on CIFAR): how ``lam`` scales the maps; None: g = lam.
        dropout: Dropout in the values of the block.
        rescale_prob: Probability that the network's mask is rescaled to the mean ``lam``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.SAMix("layer3").attach(model, x)
        parameters = [*model.parameters(), *mixer.module.block.parameters()]
        mixer(model, x, y, progress=0.0).loss().backward()
        ```
    """

    curve: float | None = 1.25
    dropout: float = 0.0
    rescale_prob: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit(self, "dropout", "rescale_prob")
        if self.curve is not None and self.curve < 1:
            raise ValueError(
                f"curve must be at least 1, below which g falls and then rises, got {self.curve}"
            )

    @classmethod
    def cifar100_tuned(cls) -> SAMix:
        """Return the tuned CIFAR-100 settings (800 epochs): a quarter of the masks is rescaled."""
        return cls(rescale_prob=0.25)

    @classmethod
    def tiny_imagenet(cls) -> SAMix:
        """Return the Tiny-ImageNet settings."""
        return cls(block_lr=0.1, block_min_lr=0.001, curve=None)

    @classmethod
    def imagenet(cls) -> SAMix:
        """Return the ImageNet settings for ResNets."""
        return cls(
            ema=(0.999, 0.99999),
            block_lr=0.1,
            block_min_lr=0.001,
            mask_decay=True,
            curve=None,
            dropout=0.1,
        )

    def _block(self, num_channels: int) -> nn.Module:
        return SAMixBlock(num_channels, self.dropout)

    def _mask(self, h: Tensor, other: Tensor, lam: Tensor, size: tuple[int, int]) -> Tensor:
        g = lam if self.curve is None else emphasis(lam, self.curve)
        scores = self.learner.block(h * (1 + g), other * (2 - g))
        return torch.sigmoid(-upsampled(scores, size, "bilinear"))

    def _penalty(self, mask: Tensor, lam: Tensor) -> Tensor:
        return super()._penalty(mask, lam) - 2 * mask.var(correction=0)


def emphasis(lam: Float[Tensor, "*b"], curve: float) -> Float[Tensor, "*b"]:
    """Return g(lam): 0, 1/2 and 1 at 0, 1/2 and 1, flat in the middle for a small ``curve``."""
    return (4 / 3 * lam**3 - 2 * lam**2 + curve * lam) / (curve - 2 / 3)


class SAMixBlock(nn.Module):
    """Attention whose queries and keys see both images; values of the partner by a small MLP."""

    def __init__(self, num_channels: int, dropout: float) -> None:
        super().__init__()
        width = max(num_channels // 2, 1)
        self.query, self.key = (conv1x1(2 * num_channels, width) for _ in range(2))
        self.value = nn.Sequential(
            conv1x1(num_channels, width, bias=False),
            nn.BatchNorm2d(width),
            nn.ELU(),
            nn.Dropout(dropout),
            conv1x1(width, 1, bias=False),
        )

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        both = torch.cat([h, other], dim=1)
        return attend(self.query(both), self.key(both), self.value(other))
