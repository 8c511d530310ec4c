"""Intersection over union of boxes (x0, y0, x1, y1), ends exclusive."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray


def box_iou(
    a: Float[np.ndarray, "n 4"] | Int[np.ndarray, "n 4"],
    b: Float[np.ndarray, "m 4"] | Int[np.ndarray, "m 4"],
) -> Float[np.ndarray, "n m"]:
    """Return intersection over union of each pair; zero if neither has an area."""
    a, b = a.astype(np.float64)[:, None], b.astype(np.float64)[None]
    inner = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    both = inner.clip(min=0).prod(axis=-1)
    either = _surface(a) + _surface(b) - both
    shares: NDArray[np.float64] = np.zeros_like(both)
    np.divide(both, either, out=shares, where=either > 0)
    return shares


def _surface(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    size: NDArray[np.float64] = (boxes[..., 2:] - boxes[..., :2]).clip(min=0)
    return size[..., 0] * size[..., 1]
