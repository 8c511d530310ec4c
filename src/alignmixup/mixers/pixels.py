"""Images that a loader has normalized, as pixels in [0, 1] and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.mixers.checks import value_range

Scale = tuple[float, ...] | None
TOLERANCE = 0.02  # bilinear resizing and 16-bit storage leave pixels slightly outside [0, 1]


def to_pixels(x: Float[Tensor, "b c h w"], mean: Scale, std: Scale) -> Float[Tensor, "b c h w"]:
    """Return x * std + mean; raise a ``ValueError`` if images on the CPU are not in [0, 1]."""
    if mean is not None and std is not None:
        if x.shape[1] != len(mean):
            raise ValueError(f"mean and std have {len(mean)} values for {x.shape[1]} channels")
        bands = zip(x.unbind(1), mean, std, strict=True)
        x = torch.stack([band * s + m for band, m, s in bands], dim=1)
    low, high = value_range(x)
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(
            f"this method needs pixels in [0, 1], got values from {low:.3g} to {high:.3g}; pass "
            "images before normalization, or set mean and std to those of the loader"
        )
    return x


def from_pixels(x: Float[Tensor, "b c h w"], mean: Scale, std: Scale) -> Float[Tensor, "b c h w"]:
    """Undo ``to_pixels``."""
    if mean is None or std is None:
        return x
    bands = zip(x.unbind(1), mean, std, strict=True)
    return torch.stack([(band - m) / s for band, m, s in bands], dim=1)


def check_scale(mean: Scale, std: Scale) -> None:
    """Raise a ``ValueError`` for a mean without a std, or a std that is not positive."""
    if (mean is None) != (std is None):
        raise ValueError(f"set both mean and std or neither, got mean={mean}, std={std}")
    if mean is None or std is None:
        return
    are_tuples = isinstance(mean, Sequence) and isinstance(std, Sequence)
    if not are_tuples or len(mean) != len(std) or min(std) <= 0:
        raise ValueError(
            f"mean and std must have one value per channel, std positive, got {mean} and {std}"
        )
