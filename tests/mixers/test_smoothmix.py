"""SmoothMix against a double loop over pixels, and its laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from alignmixup.mixers.smoothmix import SmoothDraw, SmoothMix, gaussian
from cases import Recorder

sixty_fourths = st.integers(0, 63).map(lambda k: k / 64)
sizes = st.tuples(st.integers(2, 12), st.integers(2, 12))


def draw_of(spread: float, row: float, column: float, strength: float = 1.0) -> SmoothDraw:
    perm, center = torch.tensor([2, 0, 1]), torch.tensor([row, column])
    return SmoothDraw("cut", perm, torch.tensor(1 - strength), center, torch.tensor(spread))


@given(
    spread=sixty_fourths,
    row=sixty_fourths,
    column=sixty_fourths,
    size=sizes,
    strength=sixty_fourths,
)
def test_it_is_a_double_loop(
    spread: float, row: float, column: float, size: tuple[int, int], strength: float
) -> None:
    height, width = size
    x = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    net = Recorder()
    targets = (
        SmoothMix().apply(net, x, torch.arange(3), draw_of(spread, row, column, strength)).targets
    )
    sigma = height * (0.25 + spread / 4)
    cy = (height - 1) / 2 + int(row * height) - height // 2
    cx = (width - 1) / 2 + int(column * width) - width // 2
    expected, total = torch.empty_like(x), 0.0
    for i in range(height):
        for j in range(width):
            g = strength * math.exp(-((i - cy) ** 2 + (j - cx) ** 2) / (2 * sigma**2))
            expected[..., i, j] = (1 - g) * x[..., i, j] + g * x[[2, 0, 1], :, i, j]
            total += g
    torch.testing.assert_close(net.seen, expected, atol=1e-5, rtol=1e-5)
    assert targets[0, 2] == pytest.approx(total / (height * width), abs=1e-5)
    assert targets[0, 0] == pytest.approx(1 - total / (height * width), abs=1e-5)


@given(spread=sixty_fourths, row=sixty_fourths, column=sixty_fourths, side=st.integers(2, 40))
def test_the_gaussian_is_separable_and_positive(
    spread: float, row: float, column: float, side: int
) -> None:
    g = gaussian(torch.tensor([row, column]), torch.tensor(spread), (side, side)).double()
    assert (g > 0).all()
    assert (g <= 1).all()
    u, v = g.sum(1), g.sum(0)
    torch.testing.assert_close(torch.outer(u, v) / g.sum(), g, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("side", [8, 9])
def test_the_gaussian_is_symmetric_about_its_center(side: int) -> None:
    """In the middle it is its own mirror image, also for sides of no middle pixel."""
    middle = torch.tensor([0.5, 0.5])
    g = gaussian(middle, torch.tensor(0.3), (side, side))
    torch.testing.assert_close(g, g.flip(0))
    torch.testing.assert_close(g, g.flip(1))
    torch.testing.assert_close(g, g.T)


def test_equal_images_come_back() -> None:
    x = torch.rand(1, 3, 8, 8).expand(3, 3, 8, 8)
    net = Recorder()
    SmoothMix().apply(net, x, torch.arange(3), draw_of(0.5, 0.1, 0.8))
    torch.testing.assert_close(net.seen, x, atol=1e-6, rtol=0)


def test_the_label_belongs_to_the_pixels_and_the_preset_swaps_it() -> None:
    """OpenMixup gives the anchor the mean of the Gaussian, which is the partner's."""
    x = torch.eye(3)[:, :, None, None].expand(3, 3, 16, 16).contiguous()
    draw = draw_of(0.0, 0.0, 0.0)  # a narrow one in a corner: little of the partner
    right, swapped = (
        m.apply(Recorder(), x, torch.arange(3), draw) for m in (SmoothMix(), SmoothMix.openmixup())
    )
    torch.testing.assert_close(right.logits, right.targets)
    assert right.targets[0, 0] > 0.8
    assert torch.equal(swapped.logits, right.logits)
    torch.testing.assert_close(swapped.targets[0], right.targets[0][[2, 1, 0]])


def test_the_mean_of_the_gaussian() -> None:
    """0.43 on average, from 0.12 to 0.73, as the rolls of a double grid give."""
    rng, means = torch.Generator().manual_seed(0), []
    for _ in range(500):
        draw = SmoothMix().draw(2, rng)
        means.append(float(gaussian(draw.center, draw.spread, (32, 32)).mean()))
    assert sum(means) / len(means) == pytest.approx(0.43, abs=0.03)
    assert 0.1 < min(means) < 0.2
    assert 0.65 < max(means) < 0.75


def test_no_strength_is_the_anchor() -> None:
    mixer, net, x = SmoothMix(strength=0.0), Recorder(), torch.rand(3, 3, 8, 8)
    mixed = mixer.apply(net, x, torch.arange(3), mixer.draw(3, torch.Generator().manual_seed(0)))
    assert torch.equal(net.seen, x)
    assert torch.equal(mixed.targets, torch.eye(3))


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": 1.5}, r"strength must lie in \[0, 1\], got 1.5"),
        ({"labels": "wrong"}, "labels must be 'shown' or 'swapped', got 'wrong'"),
    ],
)
def test_bad_settings_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmoothMix(**settings)
