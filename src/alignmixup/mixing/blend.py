"""Interpolation of two samples, and what every mixer checks about a batch before it starts.

mix_lam(a, a') = lam a + (1 - lam) a'          (paper, eq. for the standard mixup operator)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import (
    Criterion,
    Draw,
    Mixed,
    fusible,
    soft_cross_entropy,
    soft_targets,
    softmax_bce,
)

__all__ = [
    "LOSSES",
    "Loss",
    "blend",
    "blend_with_partner",
    "check_alpha",
    "check_batch",
    "check_case",
    "check_loss",
    "clean_batch",
    "mixed_batch",
]

Loss = Literal["ce", "bce"]
LOSSES: dict[str, Criterion] = {"ce": soft_cross_entropy, "bce": softmax_bce}


def blend(
    anchor: Float[Tensor, "b *rest"], partner: Float[Tensor, "b *rest"], lam: Float[Tensor, "*b"]
) -> Float[Tensor, "b *rest"]:
    """Interpolate; ``lam`` is the anchor's share, one for all or one a sample.

    Half-precision tensors are mixed in float32: in bf16 a share of 0.3 would be off by 0.001, and
    the labels, mixed exactly, would no longer be those of the image.
    """
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    w = lam.to(anchor.device, dtype)
    w = w.view(-1, *[1] * (anchor.ndim - 1)) if w.ndim else w
    # lerp is exact at both ends, so lam = 1 gives the anchor back bit for bit.
    return torch.lerp(partner.to(dtype), anchor.to(dtype), w).to(anchor.dtype)


@fusible
def blend_with_partner(
    x: Float[Tensor, "b *rest"], perm: Int[Tensor, " b"], lam: Float[Tensor, "*b"]
) -> Float[Tensor, "b *rest"]:
    """Interpolate each sample with its partner in the batch."""
    return blend(x, x[perm], lam)


def mixed_batch(
    logits: Tensor, labels: Tensor, perm: Int[Tensor, " b"], lam: Float[Tensor, "*b"], loss: Loss
) -> Mixed:
    """Put logits beside the labels of anchor and partner, mixed in the same shares."""
    if logits.ndim != 2:
        raise ValueError(
            f"the network must give logits [b, k], got {list(logits.shape)}; wrap it to do so"
        )
    targets = mixed_targets(labels, perm, lam, logits.shape[1])
    return Mixed(logits=logits, targets=targets, criterion=LOSSES[loss])


def clean_batch(net: nn.Module, x: Tensor, labels: Tensor, draw: Draw, loss: Loss) -> Mixed:
    """The batch as it is: what a method does in the steps in which it does not mix."""
    return mixed_batch(net(x), labels, draw.perm, torch.ones_like(draw.lam), loss)


@fusible
def mixed_targets(
    labels: Tensor, perm: Int[Tensor, " b"], lam: Float[Tensor, "*b"], num_classes: int
) -> Float[Tensor, "b k"]:
    """Labels of anchor and partner, mixed."""
    y = soft_targets(labels, num_classes)
    return blend(y, y[perm], lam)


def check_batch(x: Tensor, labels: Tensor, perm: Tensor, lam: Tensor) -> None:
    """Raise a ``ValueError`` where images, labels and draw do not belong together."""
    b = len(x)
    if not x.is_floating_point():
        raise ValueError(f"images must be floats, got {x.dtype}; divide uint8 images by 255")
    if len(labels) != b:
        raise ValueError(f"{b} images but {len(labels)} labels")
    if perm.shape != (b,):
        raise ValueError(f"the draw is for a batch of {len(perm)}, but there are {b} images")
    if lam.ndim and lam.shape != (b,):
        raise ValueError(f"lam must have shape [] or [{b}], got {list(lam.shape)}")


def check_case(case: str, known: Collection[str]) -> None:
    """Raise a ``ValueError`` for a draw of another mixer: its labels would not fit the images."""
    if case not in known:
        raise ValueError(
            f"the draw's case is {case!r}, but this mixer has {list(known)}: use its own draw()"
        )


def check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}; for no mixing use NoMix")


def check_loss(loss: str) -> None:
    if loss not in LOSSES:
        raise ValueError(f"unknown loss {loss!r}; choose from {sorted(LOSSES)}")
