"""Pixels for the methods that need them, also where a loader has normalised the images.

pixels = x std + mean, a channel at a time; without mean and std the images are in [0, 1] already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Scale", "check_scale", "from_pixels", "to_pixels"]

Scale = tuple[float, ...] | None

# Bilinear cropping and 16-bit storage leave a pixel a little outside its range; normalised images
# leave it by far.
TOLERANCE = 0.02


def to_pixels(x: Float[Tensor, "b c h w"], mean: Scale, std: Scale) -> Float[Tensor, "b c h w"]:
    """Return images in [0, 1]; on the CPU an image outside that range is a ``ValueError``.

    On a GPU the check would wait for the device at each step, so it is left out there.
    """
    if mean is not None and std is not None:
        _check_channels(x, mean)
        bands = zip(x.unbind(1), mean, std, strict=True)
        x = torch.stack([band * s + m for band, m, s in bands], dim=1)
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel():
        low, high = (float(end) for end in torch.aminmax(x.detach()))
        if low < -TOLERANCE or high > 1 + TOLERANCE:
            raise ValueError(
                f"this method needs pixels in [0, 1], got values from {low:.3g} to {high:.3g}; "
                "give it images before normalisation, or the mean and std that normalised them"
            )
    return x


def from_pixels(
    pixels: Float[Tensor, "b c h w"], mean: Scale, std: Scale
) -> Float[Tensor, "b c h w"]:
    """Undo ``to_pixels``."""
    if mean is None or std is None:
        return pixels
    bands = zip(pixels.unbind(1), mean, std, strict=True)
    return torch.stack([(band - m) / s for band, m, s in bands], dim=1)


def check_scale(mean: Scale, std: Scale) -> None:
    """Raise a ``ValueError`` for a mean without a std, or a std that cannot divide."""
    if (mean is None) != (std is None):
        raise ValueError(f"give both mean and std or neither, got mean={mean}, std={std}")
    if mean is None or std is None:
        return
    are_lists = all(isinstance(values, Sequence) for values in (mean, std))
    if not are_lists or len(mean) != len(std) or min(std) <= 0:
        raise ValueError(
            f"mean and std must have one value a channel, std positive, got {mean} and {std}"
        )


def _check_channels(x: Tensor, mean: tuple[float, ...]) -> None:
    if x.shape[1] != len(mean):
        raise ValueError(f"mean and std have {len(mean)} values for {x.shape[1]} channels")
