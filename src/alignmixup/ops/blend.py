"""Interpolation of two samples and of their labels.

mix_lam(a, a') = lam a + (1 - lam) a'          (paper, eq. for the standard mixup operator)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignmixup.contracts import fusible, soft_targets
from alignmixup.ops._precision import no_autocast


def blend(
    anchor: Float[Tensor, "b *rest"], partner: Float[Tensor, "b *rest"], lam: Float[Tensor, "*b"]
) -> Float[Tensor, "b *rest"]:
    """Interpolate; ``lam`` is the share of the anchor, a scalar or one value per sample.

    Half-precision tensors are mixed in float32: bf16 would round a share of 0.3 by 0.001, and image
    and label would be mixed in different shares.
    """
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    w = lam.to(anchor.device, dtype)
    w = w.view(-1, *[1] * (anchor.ndim - 1)) if w.ndim else w
    # lerp is exact at both ends: lam = 1 returns the anchor bit for bit.
    return torch.lerp(partner.to(dtype), anchor.to(dtype), w).to(anchor.dtype)


@fusible
def blend_with_partner(
    x: Float[Tensor, "b *rest"], perm: Int[Tensor, " b"], lam: Float[Tensor, "*b"]
) -> Float[Tensor, "b *rest"]:
    """Interpolate each sample with its partner in the batch."""
    return blend(x, x[perm], lam)


@fusible
def mixed_targets(
    labels: Tensor,
    perm: Int[Tensor, " b"],
    lam: Float[Tensor, "*b"],
    num_classes: int,
    multi_label: bool = False,
) -> Float[Tensor, "b k"]:
    """Interpolate the labels of each sample and its partner."""
    y = soft_targets(labels, num_classes, multi_label=multi_label)
    return blend(y, y[perm], lam)


def check_logits(logits: Any, batch_size: int) -> None:
    """Raise a ``ValueError`` unless a network returned one row of logits per sample."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != batch_size:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the network must return logits [b, k], got {got} for a batch of {batch_size}; "
            "wrap it by alignmixup.as_logits(model)"
        )


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a block in which operators on the device of ``x`` keep their types."""
    return no_autocast(x.device)


def channel_values(
    values: tuple[float, ...], like: Float[Tensor, "b c h w"]
) -> Float[Tensor, "c 1 1"]:
    """Return one value per channel, filled on the device: no copy from the host in a step."""
    if len(values) != like.shape[1]:
        raise ValueError(
            f"{values} has {len(values)} values, but the images have {like.shape[1]} channels: "
            "set one value per channel"
        )
    return torch.stack([like.new_full((1, 1), value) for value in values])
