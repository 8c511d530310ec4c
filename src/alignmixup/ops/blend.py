"""Interpolation of two samples, and what every mixer checks about a batch before it starts.

mix_lam(a, a') = lam a + (1 - lam) a'          (paper, eq. for the standard mixup operator)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

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
    "check_images",
    "check_logits",
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
    check_logits(logits, len(labels))
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
    check_images(x)
    b = len(x)
    if not isinstance(labels, Tensor) or not labels.ndim:
        what = "a number alone" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be a tensor [b] or [b, k], got {what}")
    if len(labels) != b:
        raise ValueError(f"{b} images but {len(labels)} labels")
    if perm.shape != (b,):
        raise ValueError(f"the draw is for a batch of {len(perm)}, but there are {b} images")
    if lam.ndim and lam.shape != (b,):
        raise ValueError(f"lam must have shape [] or [{b}], got {list(lam.shape)}")


def check_images(x: Tensor) -> None:
    """Raise a ``ValueError`` for what cannot be a batch of images.

    A pixel that is no number is looked for on the CPU alone: on a GPU the check would wait for the
    device at each step.
    """
    if not isinstance(x, Tensor) or not x.ndim:
        raise ValueError(f"images must be a tensor [b, c, h, w], got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"images must be floats, got {x.dtype}; divide uint8 images by 255")
    if not x.numel():
        raise ValueError(f"there is nothing to mix in a batch of shape {list(x.shape)}: skip it")
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"images must be finite, got values from {low:.3g} to {high:.3g}; check the loader"
            )


def check_logits(logits: Any, batch_size: int) -> None:
    """Raise a ``ValueError`` for an output that is not one row of logits a sample."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != batch_size:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the network must give logits [b, k], got {found} for a batch of {batch_size}; "
            "wrap it to do so"
        )


def check_case(case: str, known: Collection[str]) -> None:
    """Raise a ``ValueError`` for a draw of another mixer: its labels would not fit the images."""
    if case not in known:
        raise ValueError(
            f"the draw's case is {case!r}, but this mixer has {list(known)}: use its own draw()"
        )


def check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}; for no mixing use NoMix")
    if alpha == math.inf:
        raise ValueError("alpha must be finite, got inf; for shares near one half take 1000")


def check_loss(loss: str) -> None:
    if loss not in LOSSES:
        raise ValueError(f"unknown loss {loss!r}; choose from {sorted(LOSSES)}")
