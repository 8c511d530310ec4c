"""AdAutoMix (Qin et al. 2024): the block that makes the masks is also trained to make hard samples.

q_i = relu(Wq h_i), k_i = relu(Wk h_i), v_i = Wv h_i,  i = 1..N images
A_i = softmax(sum_{j != i} q_i' k_j / sqrt(d)),  masks = softmax over i of up(A_i v_i)

Network: CE(net(x~), t) + (1 - r) CE(net(x), y) + r CE(net(sum_i lam_i x_i), t)
Block, even steps: -beta CE(teacher(x~2), t2) + (1 - beta) mean sum_i lam_i cos(z~2, z_i)
Block, odd steps:  CE(teacher(x~2), t2)

z: logits of the teacher. The released code adds the cosine to what the block minimizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.base import LOSSES
from alignmixup.mixers.checks import check_integers, check_unit, image_size, require
from alignmixup.mixers.learned import Learned, attend, conv1x1, scores_of, upsampled, with_share
from alignmixup.mixers.sampling import sample_perm, sample_share
from alignmixup.mixers.stateful import NormUpdates, run_and_keep
from alignmixup.ops.blend import check_logits, without_autocast
from alignmixup.registry import register_mixer


@dataclass(frozen=True, slots=True, eq=False)
class GroupDraw(Draw):
    """Two groups of N images for each sample, the first of which is the sample itself.

    ``lam`` is its share; ``others`` are those of the rest, of what remains. Rows of ``perms`` are
    the other images, for the network and for the block. ``perm`` is the first of them.
    """

    perms: Int[Tensor, "2 others b"]
    others: Float[Tensor, "2 others"]
    block_lam: Float[Tensor, ""]
    ema_share: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class AdAutoMix(Learned):
    """AdAutoMix (Qin et al. 2024): learned masks for N images, the block trained adversarially.

    The settings that are not listed here are those of ``AutoMix``.

    Args:
        alpha: Shares are values of Beta(alpha, alpha), divided by their sum; of two images ``lam``
            is one such value.
        switch: Where the share of the anchor is at most this, or at least one minus this, the
            network gets input mixup.
        num_images: N, 3 on CIFAR-100 and Tiny-ImageNet, 2 on ImageNet.
        beta: Weight of the adversarial loss against the cosine: 0.3 on CIFAR-100, 0.4 on
            Tiny-ImageNet, 0.1 on ImageNet.
        mixup_share: r above, 0 for two images.
        cos_sign: 1 pushes a mixed sample away from its sources, as the released code does; -1 pulls
            it to them.
        lam_channel: Append the share of each image to its maps, and normalize q and k by batch
            norm; on ImageNet.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.AdAutoMix("layer3").attach(model, x)
        parameters = [*model.parameters(), *mixer.module.block.parameters()]
        mixer(model, x, y, progress=0.0).loss().backward()
        ```
    """

    case = "mask"
    has_one_lam = True

    alpha: float = 1.0
    switch: float = 0.03
    num_images: int = 3
    beta: float = 0.3
    mixup_share: float = 0.5
    cos_sign: Literal[1, -1] = 1
    lam_channel: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 2, "num_images")
        check_unit(self, "beta", "mixup_share")

    @classmethod
    def paper(cls) -> AdAutoMix:
        """Return the reading of the abstract: the cosine keeps a mixed sample near its sources."""
        return cls(cos_sign=-1)

    @classmethod
    def two_heads(cls, classifier: str = "head.linear") -> AdAutoMix:
        """Return the form of the released code: mixed images have a classifier of their own."""
        return cls(heads=2, classifier=classifier)

    @classmethod
    def tiny_imagenet(cls) -> AdAutoMix:
        """Return the Tiny-ImageNet settings."""
        return cls(block_lr=0.1, block_min_lr=0.001, beta=0.4)

    @classmethod
    def imagenet(cls) -> AdAutoMix:
        """Return the ImageNet settings: pairs."""
        return cls(
            ema=(0.999, 0.99999),
            block_lr=0.1,
            block_min_lr=0.001,
            num_images=2,
            beta=0.1,
            mixup_share=0.0,
            lam_channel=True,
        )

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        n = self.num_images - 1
        perms = torch.stack([sample_perm(batch_size, rng) for _ in range(2 * n)])
        perms = perms.view(2, n, batch_size)
        if n == 1:
            lam, block_lam = (sample_share(self.alpha, None, rng) for _ in range(2))
            others = torch.ones(2, 1, device=rng.device, dtype=torch.float32)
        else:
            # With a small alpha all values may be zero: their shares are equal then.
            values = sample_share(self.alpha, n + 1, rng).clamp_min(1e-30)
            lam = block_lam = values[0] / values.sum()
            others = (values[1:] / values[1:].sum()).expand(2, n).clone()
        share = self._ema_share(progress)
        return GroupDraw("mask", perms[0, 0], lam, perms, others, block_lam, share)

    def _block(self, num_channels: int) -> nn.Module:
        return AdAutoMixBlock(num_channels, self.lam_channel)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, state, criterion = require(draw, GroupDraw, self), self.learner, LOSSES[self.loss]
        state.follow(net, draw.ema_share)
        groups = with_anchors(draw.perms)
        shares, block_shares = group_shares(draw.lam, draw.block_lam, draw.others)
        updates = NormUpdates(state.teacher)
        with torch.no_grad(), self._tap(state.teacher, state.teacher_head, stays=True), updates:
            output, sources = run_and_keep(state.teacher, x, self.layer)
        with torch.no_grad():
            h = self._maps(state.teacher, output, x)
            masks = self.masks(h, groups[0], shares, image_size(x))
            masks = shown_masks(masks, shares, self.switch)
        with self._tap(net, None):
            clean = net(x)
        check_logits(clean, len(x))
        rows = self._rows(y, clean.shape[1])
        targets = combined(rows, groups[0], shares)
        with self._tap(net, state.head):
            logits = net(combined(x, groups[0], masks))
        extra = {"clean": (1 - self.mixup_share) * criterion(clean, rows)}
        if self.mixup_share:
            with self._tap(net, state.head):
                mixup = net(combined(x, groups[0], shares))
            extra["mixup"] = self.mixup_share * criterion(mixup, targets)
        masks = self.masks(h, groups[1], block_shares, image_size(x))
        taught = self._taught(combined(x, groups[1], masks))
        updates.repeat(self.num_images)
        loss = criterion(taught, combined(rows, groups[1], block_shares))
        near = self.cos_sign * nearness(taught, sources, groups[1], block_shares)
        extra["block"] = turned(state.turn, loss, near, self.beta)
        state.turn.copy_(1 - state.turn)
        return Mixed(logits, targets, extra, criterion)

    def masks(
        self, h: Float[Tensor, "b c h w"], group: Tensor, shares: Tensor, size: tuple[int, int]
    ) -> Float[Tensor, "n b 1 h2 w2"]:
        """Return the share of each image of the group at each pixel; they sum to 1."""
        return group_masks(self.learner.block, h, group, shares, size)


@fusible
def with_anchors(perms: Int[Tensor, "2 others b"]) -> Int[Tensor, "2 n b"]:
    """Return both groups of images, each sample the first of its own."""
    anchors = torch.arange(perms.shape[2], device=perms.device).expand(2, 1, -1)
    return torch.cat([anchors, perms], dim=1)


@fusible
def group_shares(
    lam: Float[Tensor, ""], block_lam: Float[Tensor, ""], others: Float[Tensor, "2 others"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the shares of the images for the network and for the block."""
    shares, block_shares = (
        torch.cat([first.view(1), (1 - first) * rest])
        for first, rest in zip((lam, block_lam), others, strict=True)
    )
    return shares, block_shares


@fusible
def group_masks(
    block: nn.Module, h: Tensor, group: Tensor, shares: Tensor, size: tuple[int, int]
) -> Float[Tensor, "n b 1 h2 w2"]:
    """Return the masks that ``block`` makes for the maps of each image of the group."""
    with without_autocast(h):
        scores = scores_of(block, h[group], shares)
        large = upsampled(scores.flatten(0, 1), size, "bilinear")
        return large.view(*scores.shape[:3], *size).softmax(0)


@fusible
def shown_masks(
    masks: Float[Tensor, "n b 1 h w"], shares: Float[Tensor, " n"], switch: float
) -> Float[Tensor, "n b 1 h w"]:
    """The masks that the network sees: input mixup where the anchor's share is near an end."""
    is_near = torch.minimum(shares[0], 1 - shares[0]) <= switch
    return torch.where(is_near, shares.to(masks.dtype).view(-1, 1, 1, 1, 1), masks)


@fusible
def combined(rows: Tensor, group: Int[Tensor, "n b"], shares: Tensor) -> Tensor:
    """Return sum_i shares_i rows[group_i]; a share is a number or one per sample and pixel."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    wide = rows.to(dtype)
    terms = [wide[index] * share.to(dtype) for index, share in zip(group, shares, strict=True)]
    # One by one, which keeps the memory layout of the images.
    total: Tensor = functools.reduce(torch.add, terms)
    return total.to(rows.dtype)


@fusible
def nearness(
    logits: Float[Tensor, "b k"], sources: Tensor, group: Tensor, shares: Tensor
) -> Float[Tensor, ""]:
    """Return the mean over the batch of sum_i shares_i cos(logits, logits of source i)."""
    cosines = torch.stack(
        [F.cosine_similarity(logits.float(), sources[index].float(), dim=1) for index in group]
    )
    return (shares.view(-1, 1) * cosines).sum(0).mean()


@fusible
def turned(
    turn: Int[Tensor, ""], loss: Float[Tensor, ""], near: Float[Tensor, ""], beta: float
) -> Float[Tensor, ""]:
    """Return the loss of the block: in even steps the adversarial one."""
    return torch.where(turn == 0, -beta * loss + (1 - beta) * near, loss)


class AdAutoMixBlock(nn.Module):
    """Each image attends to the keys of the others, and reads its own values, as released."""

    def __init__(self, num_channels: int, lam_channel: bool) -> None:
        super().__init__()
        self.lam_channel = lam_channel
        in_channels, width = num_channels + lam_channel, max(num_channels // 2, 1)
        norm = nn.BatchNorm2d if lam_channel else lambda width: nn.Identity()
        self.query, self.key = (
            nn.Sequential(conv1x1(in_channels, width), norm(width), nn.ReLU()) for _ in range(2)
        )
        self.value = conv1x1(in_channels, 1)

    def forward(
        self, h: Float[Tensor, "n b c h w"], shares: Float[Tensor, " n"]
    ) -> Float[Tensor, "n b 1 h w"]:
        maps = [
            with_share(each, share) if self.lam_channel else each
            for each, share in zip(h, shares, strict=True)
        ]
        flat = torch.cat(maps)
        q, k, v = (
            layer(flat).unflatten(0, h.shape[:2]) for layer in (self.query, self.key, self.value)
        )
        return attend(q, k.sum(0) - k, v)
