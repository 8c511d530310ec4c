"""Pixels of normalized images and back, and what is refused."""

from __future__ import annotations

import pytest
import torch

from alignmixup.mixers.pixels import TOLERANCE, check_scale, from_pixels, to_pixels
from cases import images

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def test_pixels_go_to_normalized_images_and_back() -> None:
    x = images(4, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=x.dtype).view(3, 1, 1) for v in (MEAN, STD))
    normalized = (x - mean) / std
    torch.testing.assert_close(from_pixels(x, MEAN, STD), normalized)
    torch.testing.assert_close(to_pixels(normalized, MEAN, STD), x)
    assert to_pixels(x, None, None) is from_pixels(x, None, None) is x


@pytest.mark.parametrize("sign", [-1, 1])
def test_rounding_may_leave_the_range_and_more_may_not(sign: int) -> None:
    edge = torch.full((1, 3, 2, 2), 0.5 + sign * 0.5, dtype=torch.float64)
    to_pixels(edge + sign * 0.9 * TOLERANCE, None, None)
    with pytest.raises(ValueError, match=r"needs pixels in \[0, 1\]"):
        to_pixels(edge + sign * 1.1 * TOLERANCE, None, None)


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (MEAN, None, "both mean and std or neither"),
        (None, STD, "both mean and std or neither"),
        (0.5, STD, "one value per channel"),
        (MEAN, 0.5, "one value per channel"),
        (MEAN, STD[:2], "one value per channel"),
        (MEAN, (0.2, 0.0, 0.3), "std positive"),
    ],
)
def test_scales_that_cannot_be_are_named(mean, std, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scale(mean, std)
