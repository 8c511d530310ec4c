"""AutoMix (Liu et al. 2022): cross-attention between two images makes the mask.

e = [h; lam], e' = [h'; 1 - lam]  (the channel of lam on ImageNet only)
q = Wq e, k = Wq e', v = Wv e';  s' = sigmoid(up(softmax(q' k / sqrt(d)) v)), m = 1 - s'
L = CE(net(x), y) + CE(net(x~), t) + CE(teacher(x~2), t2) + w max(0, |mean m2 - lam2| - margin)

x~2, t2, m2: of the second draw, which trains the block. Labels are mixed by lam, not by the mask.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Criterion, Draw, Mixed, fusible
from alignmixup.mixers.base import LOSSES
from alignmixup.mixers.checks import check_nonnegative, check_unit, image_size, require
from alignmixup.mixers.learned import (
    FrozenLearner,
    Learned,
    Learner,
    attend,
    blend_pixels,
    conv1x1,
    cosine,
    load_pretrained,
    scores_of,
    upsampled,
    with_share,
)
from alignmixup.mixers.sampling import sample_perm, sample_share, sample_unit
from alignmixup.mixers.stateful import make_teacher, read_layer
from alignmixup.ops.blend import check_logits, mixed_targets, without_autocast
from alignmixup.registry import register_mixer


@dataclass(frozen=True, slots=True, eq=False)
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
    """AutoMix and SAMix: everything but the block and the loss of the mask.

    Args:
        mask_weight: Weight of the loss that keeps the mean of the mask near ``lam``.
        mask_margin: Distance from ``lam`` that costs nothing.
        mask_decay: Let this weight fall to 0 by a cosine.
        block_prob: Probability that a step trains the block.
        pretrained: Folder of a run of this method whose block makes the masks; empty: a new one.
    """

    case = "mask"
    has_one_lam = True

    mask_weight: float = 0.1
    mask_margin: float = 0.1
    mask_decay: bool = False
    block_prob: float = 1.0
    pretrained: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pretrained", str(self.pretrained))  # JSON has no Path
        check_nonnegative(self, "mask_weight", "mask_margin")
        check_unit(self, "block_prob")

    @property
    def rescale_prob(self) -> float:
        """Probability that the network's mask is rescaled to the share of the labels."""
        return 0.0

    def _learner(self, block: nn.Module, net: nn.Module) -> nn.Module:
        if not self.pretrained:
            return super()._learner(block, net)
        encoder = make_teacher(net)
        load_pretrained(self.pretrained, block, encoder)
        return FrozenLearner(block, encoder, self._second_head(net))

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        weight = self.mask_weight * (cosine(progress) if self.mask_decay else 1.0)
        return LearnedDraw(
            "mask",
            sample_perm(batch_size, rng),
            sample_share(self.alpha, None, rng),
            block_perm=sample_perm(batch_size, rng),
            block_lam=sample_share(self.alpha, None, rng),
            ema_share=self._ema_share(progress),
            mask_weight=torch.tensor(weight, dtype=torch.float32),
            trains_block=(sample_unit((), rng) < self.block_prob).float(),
            rescales=sample_unit((), rng) < self.rescale_prob,
        )

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, state, criterion = require(draw, LearnedDraw, self), self.module, LOSSES[self.loss]
        assert isinstance(state, Learner | FrozenLearner)
        if isinstance(state, Learner):
            state.follow(net, draw.ema_share)
        reader = state.teacher if isinstance(state, Learner) else state.encoder
        with torch.no_grad():
            with self._tap(reader, None, stays=True):
                h = self._maps(reader, read_layer(reader, x, self.layer), x)
            mask = self.mask(h, draw.perm, draw.lam, image_size(x))
            mask = shown_mask(mask, draw.lam, draw.rescales, self.switch)
        with self._tap(net, None):
            clean = net(x)
        check_logits(clean, len(x))
        with self._tap(net, state.head):
            logits = net(blend_pixels(x, draw.perm, mask))
        extra = {"clean": criterion(clean, self._rows(y, clean.shape[1]))}
        if isinstance(state, Learner):
            extra |= self._block_losses(h, x, y, draw)
        return self._mixed(logits, y, draw, extra=extra)

    def _block_losses(
        self, h: Tensor, x: Tensor, y: Tensor, draw: LearnedDraw
    ) -> dict[str, Tensor]:
        """Return the losses of the block, of the teacher on the second draw and of the mask."""
        perm, lam = draw.block_perm, draw.block_lam
        mask = self.mask(h, perm, lam, image_size(x))
        logits = self._taught(blend_pixels(x, perm, mask))
        targets = mixed_targets(y, perm, lam, logits.shape[1], self.is_multi_label)
        penalty = self._penalty(mask, lam, draw.mask_weight)
        loss = self._block_criterion(logits, targets)
        return {"block": draw.trains_block * loss, "mask": penalty}

    @property
    def _block_criterion(self) -> Criterion:
        """The loss that trains the block."""
        return LOSSES[self.loss]

    def mask(
        self, h: Float[Tensor, "b c h w"], perm: Tensor, lam: Tensor, size: tuple[int, int]
    ) -> Float[Tensor, "b 1 h2 w2"]:
        """Return the share of the anchor at each pixel, from the maps of an attached mixer."""
        assert self.module is not None
        return self._mask(self.module.get_submodule("block"), h, perm, lam, size)

    @abstractmethod
    def _mask(
        self, block: nn.Module, h: Tensor, perm: Tensor, lam: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Return the mask, in the precision of the maps ``h``."""

    def _penalty(self, mask: Tensor, lam: Tensor, weight: Tensor) -> Tensor:
        """The loss of the mask."""
        return mean_penalty(mask, lam, weight, self.mask_margin)


@fusible
def mean_penalty(
    mask: Float[Tensor, "b 1 h w"],
    lam: Float[Tensor, ""],
    weight: Float[Tensor, ""],
    margin: float,
) -> Float[Tensor, ""]:
    """How far the mean share of the anchors is from ``lam``, beyond the margin, weighted."""
    return weight * ((mask.mean() - lam).abs() - margin).clamp(min=0)


@fusible
def shown_mask(
    mask: Float[Tensor, "b 1 h w"],
    lam: Float[Tensor, ""],
    rescales: Bool[Tensor, ""],
    switch: float,
) -> Float[Tensor, "b 1 h w"]:
    """The mask that the network sees: rescaled if so drawn, input mixup near both ends."""
    mask = torch.where(rescales, rescaled(mask, lam), mask)
    is_near = torch.minimum(lam, 1 - lam) <= switch
    return torch.where(is_near, lam.to(mask.dtype), mask)


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
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        heads: 2 gives network and teacher a second linear layer, for mixed images; the network's
            own is then trained on clean images alone.
        classifier: Name of the network's linear layer, for two heads.
        mask_weight: Weight of the loss that keeps the mean of the mask near ``lam``.
        mask_margin: Distance from ``lam`` that costs nothing.
        mask_decay: Let this weight fall to 0 by a cosine.
        block_prob: Probability that a step trains the block by the teacher's loss; that of the mask
            is in every step.
        pretrained: Folder of a run of this method whose block and teacher make the masks; they are
            frozen, and nothing but the network is trained. Empty: a new block is trained.
        lam_channel: Append ``lam`` to the maps as a channel.

    Raises:
        ValueError: If a setting is out of range; in ``attach``, if ``pretrained`` has no block for
            this network.

    Example:
        ```python
        mixer = am.AutoMix("layer3").attach(model, x)
        parameters = [*model.parameters(), *mixer.module.block.parameters()]
        mixer(model, x, y, progress=0.0).loss().backward()
        ```
    """

    lam_channel: bool = False

    @classmethod
    def two_heads(cls, classifier: str = "head.linear") -> AutoMix:
        """Return OpenMixup's CIFAR settings: a linear layer each for clean and mixed images."""
        return cls(heads=2, classifier=classifier)

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
            mask_decay=True,
            block_prob=0.8,
            lam_channel=True,
        )

    def _block(self, num_channels: int) -> nn.Module:
        return AutoMixBlock(num_channels, self.lam_channel)

    def _mask(
        self, block: nn.Module, h: Tensor, perm: Tensor, lam: Tensor, size: tuple[int, int]
    ) -> Tensor:
        return automix_mask(block, h, perm, lam, size)


@fusible
def automix_mask(
    block: nn.Module, h: Tensor, perm: Tensor, lam: Tensor, size: tuple[int, int]
) -> Tensor:
    """Return the share of the anchor by the block, each score repeated over its pixels."""
    with without_autocast(h):
        scores = scores_of(block, h, h[perm], lam)
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
