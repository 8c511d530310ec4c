"""The toy alignment: its numbers are the solver's, and the figure shows them."""

import numpy as np
import pytest
import torch

from alignmixup.figures.by_name import draw_figure
from alignmixup.figures.toy import ToyAlignment, draw_toy, toy_alignment
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_toy_numbers_are_those_of_the_solver(seed):
    toy = toy_alignment(seed)
    assert toy.first.shape == toy.second.shape == (16, 2)
    by_hand = ((toy.first[:, None] - toy.second[None]) ** 2).sum(-1)
    np.testing.assert_allclose(toy.cost, by_hand, atol=1e-12)
    A, B = torch.from_numpy(toy.first), torch.from_numpy(toy.second)
    plan = sinkhorn(pairwise_cost(A.T, B.T), eps=0.1, num_iters=3000).plan
    np.testing.assert_allclose(toy.assignment, 16 * plan.numpy(), atol=1e-3)
    for axis in (0, 1):
        np.testing.assert_allclose(toy.assignment.sum(axis), 1, atol=1e-3)
    np.testing.assert_allclose(toy.aligned_first, toy.assignment @ toy.second, atol=1e-3)
    np.testing.assert_allclose(toy.aligned_second, toy.assignment.T @ toy.first, atol=1e-3)


def test_the_toy_interpolations_end_at_the_sets_and_their_alignments():
    toy = toy_alignment()
    assert toy.shares == (0.0, 0.25, 0.5, 0.75, 1.0)
    np.testing.assert_array_equal(toy.keep_first[-1], toy.first)
    np.testing.assert_array_equal(toy.keep_first[0], toy.aligned_first)
    np.testing.assert_array_equal(toy.keep_second[0], toy.second)
    np.testing.assert_array_equal(toy.keep_second[-1], toy.aligned_second)
    for lam, kept, other in zip(toy.shares, toy.keep_first, toy.keep_second, strict=True):
        straight = lam * toy.first + (1 - lam) * toy.aligned_first
        np.testing.assert_allclose(kept, straight, atol=1e-12)
        straight = lam * toy.aligned_second + (1 - lam) * toy.second
        np.testing.assert_allclose(other, straight, atol=1e-12)
    assert np.abs(toy.first - toy_alignment(1).first).max() > 0.1


def test_the_toy_figure_shows_the_arrays_it_is_given():
    sets = RNG.normal(size=(4, 6, 2))
    cost, plan = RNG.random((2, 6, 6))
    shares = (0.0, 0.5, 1.0)
    mixes = RNG.normal(size=(2, 3, 6, 2))
    toy = ToyAlignment(*sets[:2], cost, plan, *sets[2:], shares, *mixes)
    figure = draw_toy(toy, "toy")
    shown = [image.get_array() for axes in figure.axes[:15] for image in axes.images]
    np.testing.assert_array_equal(shown[0], cost)
    np.testing.assert_array_equal(shown[1], plan)
    for row, expected in ((1, mixes[0]), (2, mixes[1])):
        for k in range(3):
            points = figure.axes[5 * row + k].collections[-1].get_offsets()
            np.testing.assert_array_equal(points, expected[k])
    np.testing.assert_array_equal(figure.axes[3].collections[-1].get_offsets(), sets[2])
    np.testing.assert_array_equal(figure.axes[4].collections[-1].get_offsets(), sets[3])


def test_it_takes_no_run(tmp_path):
    with pytest.raises(ValueError, match="drawn from points alone"):
        draw_figure("toy", tmp_path, run=tmp_path / "run")
