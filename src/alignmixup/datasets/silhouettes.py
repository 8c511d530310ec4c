"""The ten outlines of ``shapes``, each a test of whether a point is inside.

Coordinates are those of the shape: (u, v) with v down, in units of the radius of the circle that
contains it. Only + - * and comparisons on float32, so that results agree on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Points: TypeAlias = NDArray[np.float32]
Inside: TypeAlias = NDArray[np.bool_]
SUBSAMPLES = 4  # along a side of a pixel

# Unit vectors of 1,024 angles, rounded to 20 bits, far coarser than math libraries differ: the
# tables are the same everywhere.
NUM_ANGLES = 1024
_TURNS = [2 * math.pi * k / NUM_ANGLES for k in range(NUM_ANGLES)]
COS = np.array([round(math.cos(turn) * 2**20) / 2**20 for turn in _TURNS], dtype=np.float32)
SIN = np.array([round(math.sin(turn) * 2**20) / 2**20 for turn in _TURNS], dtype=np.float32)


def coverage(
    labels: NDArray[Any],
    center: NDArray[Any],
    size: NDArray[Any],
    angle: NDArray[Any],
    image_size: int,
) -> NDArray[Any]:
    """Count the sub-pixels inside each shape: uint8 [n, h, w], of SUBSAMPLES squared."""
    counts = np.zeros((len(labels), image_size, image_size), dtype=np.uint8)
    for label, is_inside in enumerate(_TESTS):
        (chosen,) = np.nonzero(labels == label)
        # Small blocks, so that the arrays of one test stay in the cache.
        for start in range(0, len(chosen), 64):
            rows = chosen[start : start + 64]
            counts[rows] = _count_inside(
                is_inside, center[rows], size[rows], angle[rows], image_size
            )
    return counts


def _count_inside(
    is_inside: Callable[[Points, Points], Inside],
    center: NDArray[Any],
    size: NDArray[Any],
    angle: NDArray[Any],
    image_size: int,
) -> NDArray[Any]:
    counts = np.zeros((len(size), image_size, image_size), dtype=np.uint8)
    cos, sin = COS[angle][:, None], SIN[angle][:, None]
    offsets = (np.arange(SUBSAMPLES) + 0.5) / SUBSAMPLES
    grids = [
        ((np.arange(image_size) + offset - center[:, :, None]) / size[:, None, None]).astype(
            np.float32
        )
        for offset in offsets
    ]  # each [n, 2, side]: x and y of the sub-pixels, from the center, in radii
    for x in (grid[:, 0] for grid in grids):
        for y in (grid[:, 1] for grid in grids):
            u = (cos * x)[:, None, :] + (sin * y)[:, :, None]
            v = (cos * y)[:, :, None] - (sin * x)[:, None, :]
            counts += is_inside(u, v)
    return counts


def _disc(u: Points, v: Points) -> Inside:
    return u * u + v * v <= 0.9 * 0.9


def _square(u: Points, v: Points) -> Inside:
    return np.maximum(np.abs(u), np.abs(v)) <= 0.7


def _triangle(u: Points, v: Points) -> Inside:
    return (v <= 0.5) & (1.7320508 * np.abs(u) - v <= 1.0)


def _star(u: Points, v: Points) -> Inside:
    # A pentagram: the points that at most one of its five lines cuts off.
    u = np.abs(u)
    outside = (v < -0.309017).astype(np.uint8)
    for x, y in ((0.9510565, -0.309017), (0.5877853, 0.809017)):
        outside += x * u + y * v > 0.309017
        outside += y * v - x * u > 0.309017
    return outside <= 1


def _ring(u: Points, v: Points) -> Inside:
    squared = u * u + v * v
    return (squared <= 0.95 * 0.95) & (squared >= 0.55 * 0.55)


def _cross(u: Points, v: Points) -> Inside:
    u, v = np.abs(u), np.abs(v)
    return (np.minimum(u, v) <= 0.27) & (np.maximum(u, v) <= 0.94)


def _crescent(u: Points, v: Points) -> Inside:
    squared = u * u + v * v
    # Inside one circle and outside another, of radius 0.78 about (0.5, 0).
    return (squared <= 0.95 * 0.95) & (squared - u >= 0.78 * 0.78 - 0.25)


def _heart(u: Points, v: Points) -> Inside:
    # Two discs, and the part below them down to a tip where their tangents meet.
    u = np.abs(u)
    disc = (u - 0.42) * (u - 0.42) + (v + 0.3) * (v + 0.3) <= 0.47 * 0.47
    middle = (u <= 0.42) & (v >= -0.3) & (v <= 0)
    return disc | middle | ((v >= 0) & (0.772 * u + 0.635 * v <= 0.603))


def _corner(u: Points, v: Points) -> Inside:
    # Two bars at a right angle, an L of equal arms.
    inside = np.maximum(np.abs(u), np.abs(v)) <= 0.7
    return inside & (np.minimum(u, v) <= -0.22)


def _bar(u: Points, v: Points) -> Inside:
    return (np.abs(u) <= 0.95) & (np.abs(v) <= 0.26)


# In the order of the classes.
_TESTS = (_disc, _square, _triangle, _star, _ring, _cross, _crescent, _heart, _corner, _bar)
SHAPE_NAMES = tuple(test.__name__.removeprefix("_") for test in _TESTS)
