"""Fine-grained saliency (Montabone and Soto 2010) of a batch of images, on the device.

    on  = sum_n floor(max(I - B_n, 0))      I the blurred gray image, 0 to 255
    off = sum_n floor(max(B_n - I, 0))      B_n the mean of the 2 n window, without its center
    S   = floor(255 on / max on) + floor(255 off / max off)

over n = 12, 24, 48, 28, 56, 112 pixels for every image size, with windows clipped at the border.
This reproduces OpenCV's ``StaticSaliencyFineGrained`` for 8-bit images, including rounding, with
one difference: where S exceeds 255, OpenCV's conversion to 8 bits wraps around; here it does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# Luma in 15-bit fixed point, as in OpenCV: 0.299, 0.587 and 0.114.
LUMA_BITS = 15
LUMA = (9798, 19235, 3735)


@torch.no_grad()
def fine_grained_saliency(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b h w"]:
    """Return the saliency of each pixel, 0 to 510, of RGB or gray images in [0, 1].

    A uniform image has saliency zero. The arithmetic is that of integers in floats, exact up to
    256 x 256 pixels, so all devices return the same map.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 2:
        raise ValueError(
            "saliency needs RGB or gray images [b, 3 or 1, h, w] of at least 2 x 2 pixels, "
            f"got {list(images.shape)}"
        )
    gray = _blur(_blur(_gray(images)))
    difference = (gray.unsqueeze(1) - _surround_mean(gray)).trunc()
    on = difference.clamp(min=0).sum(1)
    off = on - difference.sum(1)
    return _stretch(torch.stack([on, off])).sum(0, dtype=torch.float32)


def _gray(images: Tensor) -> Float[Tensor, "b h w"]:
    levels = (images.float() * 255).round().clamp(0, 255)
    if images.shape[1] == 1:
        return levels[:, 0]
    r, g, b = levels.unbind(1)
    total = (r * LUMA[0]).add(g, alpha=LUMA[1]).add(b, alpha=LUMA[2])
    half = 2.0 ** (LUMA_BITS - 1)
    return (total + half).div(2 * half, rounding_mode="floor")


def _blur(gray: Float[Tensor, "b h w"]) -> Float[Tensor, "b h w"]:
    """Filter by (1, 2, 1) x (1, 2, 1) / 16, reflected at the border, halves rounded up."""
    wide = F.pad(gray.unsqueeze(1), (1, 1, 1, 1), mode="reflect").squeeze(1)
    rows = (wide[:, :-2] + wide[:, 2:]).add(wide[:, 1:-1], alpha=2)
    both = (rows[..., :-2] + rows[..., 2:]).add(rows[..., 1:-1], alpha=2)
    return (both + 8).div(16, rounding_mode="floor")


def _surround_mean(gray: Float[Tensor, "b h w"]) -> Float[Tensor, "b n h w"]:
    """Return the mean of each window without its center pixel, for all n."""
    h, w = gray.shape[1:]
    integral = F.pad(gray.cumsum(1).cumsum(2), (1, 0, 1, 0))
    reach = _reach(gray.device)
    top, bottom = (at.unsqueeze(2) for at in _window(h, reach))
    left, right = (at.unsqueeze(1) for at in _window(w, reach))
    total = (
        integral[:, bottom, right]
        + integral[:, top, left]
        - integral[:, bottom, left]
        - integral[:, top, right]
    )
    others = ((bottom - top) * (right - left) - 1).clamp(min=1)
    return (total - gray.unsqueeze(1)) / others


def _reach(device: torch.device) -> Int[Tensor, "n 1"]:
    """Return all n, 12 or 28 times 1, 2 or 4, computed on the device without a copy."""
    bases = torch.arange(12, 29, 16, device=device)
    return (bases.unsqueeze(1) << torch.arange(3, device=device)).view(-1, 1)


def _window(length: int, reach: Int[Tensor, "n 1"]) -> tuple[Tensor, Tensor]:
    """Return start and end (exclusive) of the window around each position, [n, length] each."""
    after = torch.arange(1, length + 1, device=reach.device)
    return (after - reach).clamp(min=0), (after + reach).clamp(max=length)


def _stretch(total: Float[Tensor, "two b h w"]) -> Float[Tensor, "two b h w"]:
    most = total.amax((2, 3), keepdim=True).clamp(min=1)
    # float64, as in the original: 255 * (1 / 3) must not round to 85.
    return ((total / most).double() * 255).floor()


def saliency_peak(saliency: Float[Tensor, "b h w"]) -> Int[Tensor, "b 2"]:
    """Return (row, column) of the most salient pixel of each map; the first on ties."""
    flat = saliency.flatten(1).argmax(1)
    width = saliency.shape[2]
    return torch.stack([flat.div(width, rounding_mode="floor"), flat % width], dim=1)
