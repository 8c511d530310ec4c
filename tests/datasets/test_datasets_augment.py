"""Colors of one image, against torchvision's arithmetic and cases worked out by hand."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.datasets.loading.augment import Colors, change_colors, draw_colors
from torchvision_schemas import define_torchvision_schemas

NO_SHIFT = (0.0, 0.0, 0.0)
SAME = (1.0, 1.0, 1.0)


def picture(side=24, seed=0):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(smooth))


@pytest.fixture(scope="module")
def functional():
    define_torchvision_schemas()
    from torchvision.transforms import functional

    return functional


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("factors", [(1.3, 0.7, 0.6), (0.6, 1.4, 1.4), (1.4, 1.4, 0.0)])
def test_factors_are_torchvisions(functional, order, factors):
    """On floats, where torchvision rounds nothing between the three."""
    theirs = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
    )
    image = picture()
    expected = image.permute(2, 0, 1) / 255
    for which in order:
        expected = theirs[which](expected, factors[which])
    got = change_colors(image, Colors(factors, order, NO_SHIFT))
    # Half a level by rounding, and its gray has four digits where ours has three: 0.2989.
    error = (got.permute(2, 0, 1).float() - 255 * expected).abs().max()
    assert error <= 0.55
    assert (got.float() - image.float()).abs().mean() > 5


def test_factors_by_hand():
    image = torch.tensor([[[200, 100, 0], [0, 100, 200]]], dtype=torch.uint8)

    def changed(which, factor):
        factors = tuple(factor if i == which else 1.0 for i in range(3))
        return change_colors(image, Colors(factors, (0, 1, 2), NO_SHIFT))[0].tolist()

    assert changed(0, 1.4) == [[255, 140, 0], [0, 140, 255]]
    # Grays: .299 * 200 + .587 * 100 = 118.5 and .587 * 100 + .114 * 200 = 81.5; their mean is 100.
    assert changed(1, 0.5) == [[150, 100, 50], [50, 100, 150]]
    assert changed(2, 0.0) == [[118, 118, 118], [82, 82, 82]]  # halves go to the even number
    assert changed(2, 1.0) == image[0].tolist()


def test_a_shift_moves_all_pixels_alike_and_stays_in_range():
    image = torch.tensor([[[10, 120, 250]]], dtype=torch.uint8)
    moved = change_colors(image, Colors(SAME, (2, 0, 1), (-0.1, 0.02, 0.1)))
    assert moved[0, 0].tolist() == [0, 125, 255]  # 120 + 5.1


def test_factors_are_uniform_and_in_every_order():
    rng = torch.Generator().manual_seed(0)
    drawn = [draw_colors(0.4, 0.0, rng) for _ in range(1200)]
    factors = torch.tensor([c.factors for c in drawn])
    assert 0.6 <= factors.min() < 0.602
    assert 1.398 < factors.max() <= 1.4
    # Uniform of half width 0.4: deviation 0.4 / sqrt(3); five standard errors.
    assert ((factors.mean(0) - 1).abs() < 5 * 0.231 / 1200**0.5).all()
    torch.testing.assert_close(factors.std(0), torch.full((3,), 0.231), atol=0.01, rtol=0)
    orders = [c.order for c in drawn]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert sum(counts) == 1200
    assert min(counts) > 140  # 200 expected; 140 is almost five deviations below
    assert {c.shift for c in drawn} == {NO_SHIFT}


def test_lighting_has_the_covariance_of_imagenets_pixels():
    """Its axes are orthogonal: along each, the shift has the deviation stated, times lighting."""
    rng = torch.Generator().manual_seed(0)
    shifts = torch.tensor([draw_colors(0.0, 0.1, rng).shift for _ in range(4000)])
    axes = torch.tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    along = shifts @ axes
    deviations = 0.1 * torch.tensor([0.2175, 0.0188, 0.0045])
    torch.testing.assert_close(along.std(0), deviations, rtol=0.05, atol=0)
    # A brighter image is brighter in all three colors: the first axis is the gray one.
    assert torch.corrcoef(shifts.T).min() > 0.9
    assert {draw_colors(0.0, 0.1, rng).factors for _ in range(5)} == {SAME}


def test_nothing_changed_is_the_image_bit_for_bit():
    image = picture()
    assert torch.equal(change_colors(image, Colors(SAME, (1, 2, 0), NO_SHIFT)), image)
