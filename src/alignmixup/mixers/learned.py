"""Shared by AutoMix, SAMix and AdAutoMix: a small block that makes masks, trained with a teacher.

    h = stage-3 map of the teacher (EMA of the network) on the clean images
    m = mask of the block for h, h[perm] and lam: the share of the anchor at each pixel
    x~ = m x + (1 - m) x[perm]

Two independent draws: one trains the network on x~ (mask detached), the other trains the block
through the teacher, whose parameters take no gradient. So one backward pass of the sum is right.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Mixer
from alignmixup.hooks import attribute_around, check_layer_name
from alignmixup.mixers.base import Loss
from alignmixup.mixers.stateful import Stateful, make_teacher, probe

GROUP = {"block_lr": "lr", "block_min_lr": "min_lr", "block_momentum": "momentum"}


class Learner(nn.Module):
    """The block that makes masks, and the teacher that it reads and is trained through."""

    turn: Tensor

    def __init__(self, block: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.block, self.teacher = block, teacher
        self.register_buffer("turn", torch.tensor(0))  # which loss of AdAutoMix is next


@dataclass(frozen=True)
class Learned(Stateful):
    """Base class of the methods that learn to mix; AutoMix describes the settings."""

    layer: str = "layer3"
    alpha: float = 2.0
    switch: float = 0.08
    ema: tuple[float, float] = (0.999, 0.999999)
    ema_hold: float = 0.1
    block_lr: float | None = None
    block_min_lr: float | None = None
    block_momentum: float | None = None
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        if len(self.ema) != 2 or not all(0 <= m <= 1 for m in self.ema):
            raise ValueError(f"ema must be two numbers in [0, 1], got {self.ema}")
        check_unit(self, "switch", "ema_hold")

    @property
    def optimizer_group(self) -> Mapping[str, float]:
        values = {GROUP[f.name]: getattr(self, f.name) for f in fields(self) if f.name in GROUP}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def learner(self) -> Learner:
        """The module of an attached mixer."""
        assert isinstance(self.module, Learner)
        return self.module

    def _build(self, net: nn.Module, x: Tensor) -> nn.Module:
        output, _ = probe(net, x, self.layer)
        maps = self._maps(net, output)
        block = self._block(maps.shape[1]).to(maps.dtype)
        return Learner(block, make_teacher(net))

    @abstractmethod
    def _block(self, num_channels: int) -> nn.Module:
        """Return the block for maps of this many channels."""

    def _maps(self, net: nn.Module, output: Tensor) -> Float[Tensor, "b c h w"]:
        """Return the output of ``layer`` as maps in float32 or better."""
        wide = output if output.dtype == torch.float64 else output.float()
        if wide.ndim == 4:
            return wide
        prefix = attribute_around(net, self.layer, "num_prefix_tokens") or 0
        side = math.isqrt(max(wide.shape[1] - prefix, 0)) if wide.ndim == 3 else 0
        if not side or side * side + prefix != wide.shape[1]:
            raise ValueError(
                f"layer {self.layer!r} returns {list(output.shape)}; {type(self).__name__} needs "
                "maps [b, c, h, w] or the tokens of a square grid: choose another layer"
            )
        return wide[:, prefix:].transpose(1, 2).reshape(len(wide), -1, side, side)

    def _ema_share(self, progress: float) -> Tensor:
        """The share of the network's weights that enters the teacher: one minus the momentum."""
        first, last = (1 - momentum for momentum in self.ema)
        if progress < self.ema_hold:
            return torch.tensor(first)
        return torch.tensor(last + (first - last) * cosine(progress))


def check_unit(mixer: Mixer, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is not in [0, 1]."""
    for name in names:
        if not 0 <= getattr(mixer, name) <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {getattr(mixer, name)}")


def cosine(progress: float) -> float:
    """Fall from 1 to 0 by half a cosine."""
    return (1 + math.cos(math.pi * progress)) / 2


def conv1x1(in_channels: int, out_channels: int, *, bias: bool = True) -> nn.Conv2d:
    """Return a 1 x 1 convolution with weights from N(0, 0.01^2)."""
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=bias)
    nn.init.normal_(conv.weight, std=0.01)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def with_share(h: Float[Tensor, "b c h w"], share: Tensor) -> Float[Tensor, "b c2 h w"]:
    """Append a channel that holds a share."""
    return torch.cat([h, share.to(h.dtype).expand(len(h), 1, *h.shape[2:])], dim=1)


def attend(
    q: Float[Tensor, "*b d h w"], k: Float[Tensor, "*b d h w"], v: Float[Tensor, "*b 1 h w"]
) -> Float[Tensor, "*b 1 h w"]:
    """Return softmax_j(q_i . k_j / sqrt(d)) v_j at each position i."""
    similarity = q.flatten(-2).transpose(-1, -2) @ k.flatten(-2) / math.sqrt(q.shape[-3])
    mean = similarity.softmax(-1) @ v.flatten(-2).transpose(-1, -2)
    return mean.reshape(v.shape)


def upsampled(
    scores: Float[Tensor, "b 1 h w"], size: tuple[int, int], mode: str
) -> Float[Tensor, "b 1 h2 w2"]:
    """Resize scores to the images."""
    corners = False if mode == "bilinear" else None
    return F.interpolate(scores, size, mode=mode, align_corners=corners)


def blend_pixels(
    x: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"], mask: Tensor
) -> Float[Tensor, "b c h w"]:
    """Return ``mask`` x + (1 - ``mask``) other, exact where the mask is 0 or 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.lerp(other.to(dtype), x.to(dtype), mask.to(dtype)).to(x.dtype)
