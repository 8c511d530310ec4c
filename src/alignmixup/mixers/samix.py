"""SAMix (Li et al. 2021): AutoMix with a block that sees both images, and a mask of more variance.

h <- h (1 + g), h' <- h' (2 - g),  g = (4/3 lam^3 - 2 lam^2 + k lam) / (k - 2/3)
q = Wq [h; h'], k = Wk [h; h'], v = MLP(h')
s' = sigmoid(up(softmax(q' k / sqrt(d)) v)), m = 1 - s'
mask loss = w (max(0, |mean m - lam| - margin) - 2 Var m)
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Criterion, fusible
from alignmixup.mixers.automix import PairLearned, mean_penalty
from alignmixup.mixers.checks import check_nonnegative, check_unit
from alignmixup.mixers.decoupled import decoupled_cross_entropy
from alignmixup.mixers.learned import attend, conv1x1, scores_of, upsampled
from alignmixup.ops.blend import without_autocast
from alignmixup.registry import register_mixer


@register_mixer
@dataclass(frozen=True)
class SAMix(PairLearned):
    """SAMix (Li et al. 2021): AutoMix with a block that sees both images, by the released code.

    Training is that of AutoMix: a teacher, a clean and a mixed batch. The loss of the mask also
    rewards its variance. The settings that are not listed here are those of ``AutoMix``; with
    ``pretrained`` this is SAMix^P.

    Args:
        curve: k above, at least 1 (1.25 on CIFAR): how ``lam`` scales the maps; None: g = lam.
        dropout: Dropout of the values of the block.
        rescale_prob: Probability that the network's mask is rescaled to the mean ``lam``.
        global_eta: Weight of a global loss of the block, in which the two classes of a sample
            compete with all others but not with each other. 0 is the released code, whose weight of
            such a loss has no effect: it multiplies terms of labels that are 0.

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
    global_eta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit(self, "dropout", "rescale_prob")
        check_nonnegative(self, "global_eta")
        if self.global_eta and self.loss != "ce":
            raise ValueError(f"global_eta extends cross-entropy: set loss='ce', got {self.loss!r}")
        if self.curve is not None and not 1 <= self.curve < math.inf:
            raise ValueError(
                "curve must be finite and at least 1, below which g falls and then rises, got "
                f"{self.curve}; None is g = lam"
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

    @property
    def _block_criterion(self) -> Criterion:
        if not self.global_eta:
            return super()._block_criterion
        return functools.partial(decoupled_cross_entropy, eta=self.global_eta, by_label=True)

    def _mask(
        self, block: nn.Module, h: Tensor, perm: Tensor, lam: Tensor, size: tuple[int, int]
    ) -> Tensor:
        return samix_mask(block, h, perm, lam, size, self.curve)

    def _penalty(self, mask: Tensor, lam: Tensor, weight: Tensor) -> Tensor:
        return variance_penalty(mask, lam, weight, self.mask_margin)


@fusible
def samix_mask(
    block: nn.Module,
    h: Tensor,
    perm: Tensor,
    lam: Tensor,
    size: tuple[int, int],
    curve: float | None,
) -> Tensor:
    """Return the share of the anchor by the block, its scores interpolated between cells."""
    lam = lam.to(h.dtype)
    g = lam if curve is None else emphasis(lam, curve)
    with without_autocast(h):
        scores = scores_of(block, h * (1 + g), h[perm] * (2 - g))
        return torch.sigmoid(-upsampled(scores, size, "bilinear"))


@fusible
def variance_penalty(
    mask: Float[Tensor, "b 1 h w"],
    lam: Float[Tensor, ""],
    weight: Float[Tensor, ""],
    margin: float,
) -> Float[Tensor, ""]:
    """The penalty of AutoMix minus twice the variance of the mask, weighted."""
    return mean_penalty(mask, lam, weight, margin) - 2 * weight * mask.var(correction=0)


def emphasis(lam: Float[Tensor, "*b"], curve: float) -> Float[Tensor, "*b"]:
    """Return g(lam): 0, 1/2 and 1 at 0, 1/2 and 1, flat in the middle for a small ``curve``."""
    return (4 / 3 * lam**3 - 2 * lam**2 + curve * lam) / (curve - 2 / 3)


class SAMixBlock(nn.Module):
    """Attention whose queries and keys see both images; values of the partner by a small MLP."""

    def __init__(self, num_channels: int, dropout: float) -> None:
        super().__init__()
        width = max(num_channels // 2, 1)
        self.query, self.key = (conv1x1(2 * num_channels, width) for _ in range(2))
        first, last = conv1x1(num_channels, width, bias=False), conv1x1(width, 1, bias=False)
        # Dropout was the fourth once: its name stays free, so that old checkpoints load.
        parts = {"0": first, "1": nn.BatchNorm2d(width), "2": nn.ELU(), "4": last}
        self.value = nn.Sequential(OrderedDict(parts, dropout=nn.Dropout(dropout)))

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        both = torch.cat([h, other], dim=1)
        return attend(self.query(both), self.key(both), self.value(other))
