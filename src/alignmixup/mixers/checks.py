"""Checks of batches, draws and settings: each raises a ``ValueError`` with the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from alignmixup.contracts import Draw, Mixer

D = TypeVar("D", bound=Draw)


def check_batch(x: Tensor, labels: Tensor, draw: Draw) -> None:
    """Raise a ``ValueError`` if images, labels and draw differ in batch size or device."""
    check_images(x)
    b = len(x)
    if not isinstance(labels, Tensor) or not labels.ndim:
        got = "a scalar" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be a tensor [b] or [b, k], got {got}")
    if len(labels) != b:
        raise ValueError(f"got {b} images but {len(labels)} labels")
    if labels.device != x.device:
        raise ValueError(
            f"images are on {x.device} but labels on {labels.device}: move the labels, "
            "y.to(x.device)"
        )
    check_draw(draw, b)


def check_draw(draw: Draw, batch_size: int) -> None:
    """Raise a ``ValueError`` for a draw of another batch, or with values that no draw has."""
    perm, lam, b = draw.perm, draw.lam, batch_size
    for name, value in (("perm", perm), ("lam", lam)):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of a draw must be a tensor, got {value!r}: use torch.tensor({value!r})"
            )
    if perm.shape != (b,):
        raise ValueError(f"the draw is for a batch of {len(perm)}, got {b} images")
    if perm.dtype not in (torch.int64, torch.int32):  # indexing by uint8 would be a mask
        raise ValueError(f"perm must be int64 or int32, got {perm.dtype}")
    low, high = value_range(perm)
    if low < 0 or high >= b:
        raise ValueError(f"perm must have values 0 to {b - 1}, got {low:.0f} to {high:.0f}")
    if lam.ndim and lam.shape != (b,):
        raise ValueError(f"lam must have shape [] or [{b}], got {list(lam.shape)}")
    low, high = value_range(lam)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"lam must lie in [0, 1], got values from {low:.3g} to {high:.3g}")


def check_images(x: Tensor) -> None:
    """Raise a ``ValueError`` unless ``x`` is a batch of float images.

    Values are checked on the CPU only: on a GPU the check would synchronize at each step.
    """
    if not isinstance(x, Tensor) or not x.ndim:
        raise ValueError(f"images must be a tensor [b, c, h, w], got {type(x).__name__}")
    if not x.is_floating_point():
        raise ValueError(f"images must be floats, got {x.dtype}; divide uint8 images by 255")
    if not x.numel():
        raise ValueError(f"images must not be empty, got shape {list(x.shape)}: skip this batch")
    low, high = value_range(x)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"images must be finite, got values from {low:.3g} to {high:.3g}; check the loader"
        )


def image_size(x: Tensor) -> tuple[int, int]:
    """Return rows and columns of a batch of images; raise a ``ValueError`` if it has none."""
    if x.ndim != 4:
        raise ValueError(f"images must be [b, c, h, w], got {list(x.shape)}")
    return x.shape[2], x.shape[3]


def value_range(x: Tensor) -> tuple[float, float]:
    """Return the extreme values of a tensor on the CPU; (0, 0) where reading is too slow."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return 0.0, 0.0
    low, high = torch.aminmax(x.detach())
    return float(low), float(high)


def is_number(value: object) -> bool:
    """Return whether a setting is a number, which a string of digits is not."""
    return isinstance(value, int | float)


def check_alpha(alpha: float) -> None:
    if not (is_number(alpha) and 0 < alpha < math.inf):
        raise ValueError(
            f"alpha must be positive and finite, got {alpha!r}; use NoMix for no mixing"
        )


def check_nonnegative(mixer: Mixer, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is negative or infinite."""
    for name in names:
        value = getattr(mixer, name)
        if not (is_number(value) and 0 <= value < math.inf):
            raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")


def check_unit(mixer: Mixer, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is not in [0, 1]."""
    for name in names:
        value = getattr(mixer, name)
        if not (is_number(value) and 0 <= value <= 1):
            raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


def check_integers(mixer: Mixer, least: int, *names: str) -> None:
    """Raise a ``ValueError`` if one of these settings is not an integer from ``least`` up."""
    for name in names:
        value = getattr(mixer, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_grids(grids: tuple[int, ...], least: int) -> None:
    """Raise a ``ValueError`` unless ``grids`` are different numbers of blocks to draw from."""
    if not isinstance(grids, tuple | list) or not all(isinstance(n, int) for n in grids):
        raise ValueError(f"grids must be a tuple of integers, such as (2, 4), got {grids!r}")
    if not grids or len(set(grids)) < len(grids) or min(grids) < least:
        raise ValueError(f"grids must be different integers >= {least}, got {grids}")


def require(draw: Draw, kind: type[D], mixer: Mixer) -> D:
    """Return ``draw`` if it has the extra fields of ``kind``; raise a ``ValueError`` otherwise."""
    if not isinstance(draw, kind):
        raise ValueError(
            f"{type(mixer).__name__} needs a {kind.__name__}, got a {type(draw).__name__}: "
            "use the mixer's own draw()"
        )
    return draw


def check_weights(weights: Mapping[str, float], known: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for an unknown case or weights that cannot be drawn from."""
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise ValueError(f"unknown cases {unknown}; choose from {list(known)}")
    if any(w < 0 for w in weights.values()) or not 0 < sum(weights.values()) < math.inf:
        raise ValueError(f"case weights must be >= 0, finite and not all zero, got {dict(weights)}")
