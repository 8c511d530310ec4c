"""Shared by AutoMix, SAMix and AdAutoMix: a small block that makes masks, trained with a teacher.

    h = stage-3 map of the teacher (EMA of the network) on the clean images
    m = mask of the block for h, h[perm] and lam: the share of the anchor at each pixel
    x~ = m x + (1 - m) x[perm]

Two independent draws: one trains the network on x~ (mask detached), the other trains the block
through the teacher, whose parameters take no gradient. So one backward pass of the sum is right.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from alignmixup.contracts import fusible
from alignmixup.hooks import tap
from alignmixup.mixers.base import Loss
from alignmixup.mixers.checks import check_unit
from alignmixup.mixers.layouts import COUNT, channels_first, patch_tokens
from alignmixup.mixers.stateful import Stateful, copied, follow, make_teacher, probe, run
from alignmixup.ops.gradient_saliency import FREEZE
from alignmixup.wrappers import check_layer_name, find_layer

CHECKPOINT = "checkpoint.safetensors"  # of a run, in its folder
GROUP = {"block_lr": "lr", "block_min_lr": "min_lr", "block_momentum": "momentum"}


class Learner(nn.Module):
    """The block that makes masks, and the teacher that it reads and is trained through.

    With a second head both networks have one for mixed images: ``head`` is the network's.
    """

    turn: Tensor

    def __init__(self, block: nn.Module, teacher: nn.Module, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.block, self.teacher = block, teacher
        self.register_buffer("turn", torch.tensor(0))  # which loss of AdAutoMix is next
        self.head, self.teacher_head = head, copy.deepcopy(head)
        if self.teacher_head is not None:
            self.teacher_head.requires_grad_(False)

    def follow(self, net: nn.Module, share: Tensor) -> None:
        """Take ``share`` of the network and of its second head into the teacher."""
        follow(self.teacher, net, share)
        if self.head is not None and self.teacher_head is not None:
            follow(self.teacher_head, self.head, share)


class FrozenLearner(nn.Module):
    """A block that is trained already and the network that it reads; neither changes."""

    def __init__(self, block: nn.Module, encoder: nn.Module, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.block, self.encoder = block.requires_grad_(False), encoder.requires_grad_(False)
        self.head = head
        self.train()

    def train(self, mode: bool = True) -> FrozenLearner:
        """Set the mode of the head; block and encoder stay in evaluation mode."""
        super().train(mode)
        self.block.eval()
        self.encoder.eval()
        return self


@dataclass(frozen=True)
class Learned(Stateful):
    """Base class of the methods that learn to mix.

    Args:
        layer: Layer of the teacher that the block reads: maps, or tokens of a square grid.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        switch: Where the smaller share is at most this, the network gets input mixup.
        ema: Momentum of the teacher at the start and at the end of training.
        ema_hold: Share of training in which it stays at the first; then it follows a cosine.
        block_lr: Learning rate of the block; None: the network's.
        block_min_lr: Where that ends; None: as the network's.
        block_momentum: Momentum of the block; None: the network's.
        loss: ``"ce"``, ``"bce"`` of the softmax, or ``"sigmoid_bce"`` for multi-label targets.
        heads: 2 gives network and teacher a second linear layer, for mixed images.
        classifier: Name of the network's linear layer, for two heads.
    """

    layer: str = "layer3"
    alpha: float = 2.0
    switch: float = 0.08
    ema: tuple[float, float] = (0.999, 0.999999)
    ema_hold: float = 0.1
    block_lr: float | None = None
    block_min_lr: float | None = None
    block_momentum: float | None = None
    loss: Loss = "ce"
    heads: Literal[1, 2] = 1
    classifier: str = "head.linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        check_layer_name(self.classifier)
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
        maps = self._maps(net, output, x)
        block = self._block(maps.shape[1]).to(maps.dtype)
        return self._learner(block, net)

    def _learner(self, block: nn.Module, net: nn.Module) -> nn.Module:
        """Return the module of an attached mixer."""
        return Learner(block, make_teacher(net), self._second_head(net))

    def _second_head(self, net: nn.Module) -> nn.Linear | None:
        return second_head(net, self.classifier) if self.heads == 2 else None

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.classifier,) if self.heads == 2 else ()

    def _tap(
        self, net: nn.Module, head: nn.Module | None, *, stays: bool = False
    ) -> AbstractContextManager[None]:
        """Let a network end in ``head`` for one pass; None: in its own.

        In every pass where there are two: torch.compile ignores hooks added later.
        """
        if self.heads == 1:
            return nullcontext()
        action = None if head is None else in_place
        return tap(net, self.classifier, action, head, reads_input=True, stays=stays)

    @abstractmethod
    def _block(self, num_channels: int) -> nn.Module:
        """Return the block for maps of this many channels."""

    def _maps(self, net: nn.Module, output: Tensor, x: Tensor) -> Float[Tensor, "b c h w"]:
        """Return the output of ``layer`` as maps in float32 or better."""
        wide = output if output.dtype == torch.float64 else output.float()
        if wide.ndim == 4:
            return channels_first(net, self.layer, wide, x)
        if wide.ndim == 3:
            patches = patch_tokens(net, self.layer, wide)
            side = math.isqrt(patches.shape[1])
            if side and side * side == patches.shape[1]:
                return patches.transpose(1, 2).reshape(len(wide), -1, side, side)
        raise ValueError(
            f"layer {self.layer!r} returns {list(output.shape)}; {type(self).__name__} needs maps "
            f"[b, c, h, w] or the tokens of a square grid: choose another layer, or {COUNT}"
        )

    def _taught(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Return the teacher's logits for images that the block has mixed."""
        state = self.learner
        with self._tap(state.teacher, state.teacher_head, stays=True):
            logits: Tensor = run(state.teacher, x)
        if x.requires_grad and not logits.requires_grad:
            raise ValueError(
                f"{type(self).__name__} has no gradient at the mask, so that its block would not "
                f"learn: a part of the network runs without gradients; {FREEZE}"
            )
        return logits

    def _ema_share(self, progress: float) -> Tensor:
        """The share of the network's weights that enters the teacher: one minus the momentum."""
        first, last = (1 - momentum for momentum in self.ema)
        if progress < self.ema_hold:
            return torch.tensor(first, dtype=torch.float32)
        return torch.tensor(last + (first - last) * cosine(progress), dtype=torch.float32)


def in_place(features: Tensor, head: nn.Module) -> Tensor:
    """Return the logits of ``head``: a tap that puts it in the place of a classifier."""
    logits: Tensor = head(features)
    return logits


def second_head(net: nn.Module, classifier: str) -> nn.Linear:
    """Return a copy of the linear layer that ends the network."""
    linear, _ = find_layer(net, classifier)
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"classifier {classifier!r} is a {type(linear).__name__}; two heads need the name of "
            "the linear layer that returns the logits"
        )
    return copied(linear)


def load_pretrained(folder: str, block: nn.Module, encoder: nn.Module) -> None:
    """Load the block and the teacher of a run; a classifier for other classes is left out."""
    file = Path(folder) / CHECKPOINT
    try:
        with safe_open(file, framework="pt") as tensors:
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"pretrained must be the folder of a run, got {folder!r}: {CHECKPOINT} cannot be read "
            f"there ({error})"
        ) from None
    parts = {
        part: {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
        for part, prefix in (("block", "mixer.block."), ("teacher", "mixer.teacher."))
    }
    if not all(parts.values()):
        raise ValueError(
            f"pretrained={folder!r} has no block that makes masks: use a run of the same method"
        )
    last = [name for name, part in encoder.named_modules() if isinstance(part, nn.Linear)][-1:]
    for module, own, apart in ((block, parts["block"], []), (encoder, parts["teacher"], last)):
        expected = module.state_dict()
        apart = [name for name in own if name.rpartition(".")[0] in apart]
        wrong = [
            name
            for name in sorted({*own, *expected} - {*apart})
            if name not in own or name not in expected or own[name].shape != expected[name].shape
        ]
        if wrong:
            raise ValueError(
                f"pretrained={folder!r} is of another method or network ({wrong[0]} differs): use "
                "a run with the same network, layer and mixer settings"
            )
        fits = {name: own[name] for name in own if own[name].shape == expected[name].shape}
        module.load_state_dict(fits, strict=False)


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


def scores_of(block: nn.Module, h: Tensor, *others: Tensor) -> Tensor:
    """Run the block in the type of its weights, and return its scores in that of ``h``.

    The weights are float32 or better unless somebody has converted the module, as Lightning does.
    """
    dtype = next(block.parameters()).dtype
    scores: Tensor = block(*(each.to(dtype) for each in (h, *others)))
    return scores.to(h.dtype)


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


@fusible
def blend_pixels(
    x: Float[Tensor, "b c h w"], perm: Int[Tensor, " b"], mask: Tensor
) -> Float[Tensor, "b c h w"]:
    """Return ``mask`` x + (1 - ``mask``) x[perm], exact where the mask is 0 or 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.lerp(x[perm].to(dtype), x.to(dtype), mask.to(dtype)).to(x.dtype)
