"""AutoMix (Liu et al. 2022): cross-attention between two images makes the mask.

e = [h; lam], e' = [h'; 1 - lam]  (the channel of lam on ImageNet only)
q = Wq e, k = Wq e', v = Wv e';  s' = sigmoid(up(softmax(q' k / sqrt(d)) v)), m = 1 - s'
L = CE(net(x), y) + CE(net(x~), t) + CE(teacher(x~2), t2) + w max(0, |mean m2 - lam2| - margin)

x~2, t2, m2: of the second draw, which trains the block. Labels are mixed by lam, not by the mask.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import (
    LOSSES,
    check_nonnegative,
    image_size,
    require,
    sample_perm,
    sample_share,
    sample_unit,
)
from alignmixup.mixers.learned import (
    Learned,
    attend,
    blend_pixels,
    check_unit,
    conv1x1,
    cosine,
    upsampled,
    with_share,
)
from alignmixup.mixers.stateful import follow, run_to
from alignmixup.ops.blend import blend, check_logits, without_autocast
from alignmixup.registry import register_mixer


@dataclass(frozen=True, slots=True)
class LearnedDraw(Draw):
    """Two draws of a pair, for the network and for the block, and what is scheduled."""

    block_perm: Int[Tensor, " b"]
    block_lam: Float[Tensor, ""]
    ema_share: Float[Tensor, ""]
    mask_weight: Float[Tensor, ""]
    trains_block: Float[Tensor, ""]
    rescales: Bool[Tensor, ""]


@dataclass(frozen=True)
class PairLearned(Learned):
    """AutoMix and SAMix: everything but the block and the loss of the mask."""

    mask_weight: float = 0.1
    mask_margin: float = 0.1
    mask_decay: bool = False
    block_prob: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative(self, "mask_weight", "mask_margin")
        check_unit(self, "block_prob")

    @property
    def cases(self) -> Mapping[str, float]:
        return {"mask": 1.0}

    @property
    def rescale_prob(self) -> float:
        """Probability that the network's mask is rescaled to the share of the labels."""
        return 0.0

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        weight = self.mask_weight * (cosine(progress) if self.mask_decay else 1.0)
        return LearnedDraw(
            "mask",
            sample_perm(batch_size, rng),
            sample_share(self.alpha, None, rng),
            block_perm=sample_perm(batch_size, rng),
            block_lam=sample_share(self.alpha, None, rng),
            ema_share=self._ema_share(progress),
            mask_weight=torch.tensor(weight),
            trains_block=(sample_unit((), rng) < self.block_prob).float(),
            rescales=sample_unit((), rng) < self.rescale_prob,
        )

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, state, criterion = require(draw, LearnedDraw, self), self.learner, LOSSES[self.loss]
        follow(state.teacher, net, draw.ema_share)
        with torch.no_grad():
            h = self._maps(state.teacher, run_to(state.teacher, x, self.layer))
            shown = self._shown(h, x, draw)
        clean = net(x)
        check_logits(clean, len(x))
        logits = net(blend_pixels(x, x[draw.perm], shown))
        mask = self.mask(h, draw.block_perm, draw.block_lam, image_size(x))
        taught = state.teacher(blend_pixels(x, x[draw.block_perm], mask))
        rows = self._rows(y, logits.shape[1])
        taught_rows = blend(rows, rows[draw.block_perm], draw.block_lam)
        penalty = draw.mask_weight * self._penalty(mask, draw.block_lam)
        extra = {
            "clean": criterion(clean, rows),
            "block": draw.trains_block * criterion(taught, taught_rows),
            "mask": draw.trains_block * penalty,
        }
        targets = blend(rows, rows[draw.perm], draw.lam)
        return Mixed(logits, targets, extra, criterion)

    def _shown(self, h: Tensor, x: Tensor, draw: LearnedDraw) -> Float[Tensor, "b 1 h w"]:
        """The mask that the network sees: without gradient, input mixup near both ends."""
        mask = self.mask(h, draw.perm, draw.lam, image_size(x))
        mask = torch.where(draw.rescales, rescaled(mask, draw.lam), mask)
        is_near = torch.minimum(draw.lam, 1 - draw.lam) <= self.switch
        return torch.where(is_near, draw.lam.to(mask.dtype), mask)

    def mask(
        self, h: Float[Tensor, "b c h w"], perm: Tensor, lam: Tensor, size: tuple[int, int]
    ) -> Float[Tensor, "b 1 h2 w2"]:
        """Return the share of the anchor at each pixel, from the maps of an attached mixer."""
        with without_autocast(h):
            return self._mask(h, h[perm], lam.to(h.dtype), size)

    @abstractmethod
    def _mask(self, h: Tensor, other: Tensor, lam: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mask for maps of anchors and partners, in their precision."""

    def _penalty(self, mask: Tensor, lam: Tensor) -> Tensor:
        """How far the mean share of the anchors is from ``lam``, beyond the margin."""
        return ((mask.mean() - lam).abs() - self.mask_margin).clamp(min=0)


def rescaled(mask: Float[Tensor, "b 1 h w"], lam: Tensor) -> Float[Tensor, "b 1 h w"]:
    """Return masks of mean ``lam`` in [0, 1]: scaled down, or the partner's share scaled down."""
    mean = mask.mean((1, 2, 3), keepdim=True)
    down = mask * (lam / mean)
    up = 1 - (1 - mask) * ((1 - lam) / (1 - mean))
    return torch.where(mean > lam, down, up)


@register_mixer
@dataclass(frozen=True)
class AutoMix(PairLearned):
    """AutoMix (Liu et al. 2022): a small cross-attention block learns the mask.

    The block is trained through a teacher, the moving average of the network. The network is
    trained on the clean and on the mixed batch.

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
        mask_weight: Weight of the loss that keeps the mean of the mask near ``lam``.
        mask_margin: Distance from ``lam`` that costs nothing.
        mask_decay: Let this weight fall to 0 by a cosine.
        block_prob: Probability that a step trains the block.
        lam_channel: Append ``lam`` to the maps as a channel.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.AutoMix("layer3").attach(model, x)
        parameters = [*model.parameters(), *mixer.module.block.parameters()]
        mixer(model, x, y, progress=0.0).loss().backward()
        ```
    """

    lam_channel: bool = False

    @classmethod
    def tiny_imagenet(cls) -> AutoMix:
        """Return the Tiny-ImageNet settings: the block has a learning rate of its own."""
        return cls(block_lr=0.1, block_min_lr=0.001)

    @classmethod
    def imagenet(cls) -> AutoMix:
        """Return the ImageNet settings for ResNets."""
        return cls(
            ema=(0.999, 0.99999),
            block_lr=0.1,
            block_min_lr=0.001,
            mask_decay=True,
            lam_channel=True,
        )

    @classmethod
    def deit(cls) -> AutoMix:
        """Return the ImageNet settings for DeiT-S, with AdamW."""
        return cls(
            "blocks.5",
            ema=(0.999, 0.99999),
            ema_hold=0.25,
            block_lr=1e-3,
            block_min_lr=1e-4,
            block_prob=0.8,
            lam_channel=True,
        )

    def _block(self, num_channels: int) -> nn.Module:
        return AutoMixBlock(num_channels, self.lam_channel)

    def _mask(self, h: Tensor, other: Tensor, lam: Tensor, size: tuple[int, int]) -> Tensor:
        scores = self.learner.block(h, other, lam)
        return torch.sigmoid(-upsampled(scores, size, "nearest"))


class AutoMixBlock(nn.Module):
    """Cross-attention from the anchor to the partner; one projection for both."""

    def __init__(self, num_channels: int, lam_channel: bool) -> None:
        super().__init__()
        self.lam_channel = lam_channel
        in_channels = num_channels + lam_channel
        self.query = conv1x1(in_channels, max(num_channels // 2, 1))
        self.value = conv1x1(in_channels, 1)

    def forward(self, h: Tensor, other: Tensor, lam: Tensor) -> Tensor:
        if self.lam_channel:
            h, other = with_share(h, lam), with_share(other, 1 - lam)
        return attend(self.query(h), self.query(other), self.value(other))
