"""Measuring pose and appearance: what is known must come out, and what is not must not."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from alignmixup.datasets import draw_shapes
from alignmixup.figures import pose_measures as pose, pose_plans as plans
from alignmixup.figures.pose import draw_pose
from alignmixup.figures.pose_measures import PosePoint
from alignmixup.figures.pose_plans import PLANS
from alignmixup.ops.align import align_mix

SIDE = 16


@pytest.fixture(scope="module")
def drawing():
    return draw_shapes("test", 200, SIDE)


@pytest.fixture(scope="module")
def images(drawing):
    return drawing.image_set.images / 255


class Pixels:
    """A painter whose features are the images themselves: it loses nothing."""

    layer = "pixels"

    def __init__(self):
        self.net = nn.Linear(1, 1)

    def features(self, x):
        return x

    def paint(self, features):
        return features


@pytest.fixture(scope="module")
def points(drawing):
    found = pose.pose_points(Pixels(), drawing, num_pairs=40, shares=(0.0, 0.5, 1.0))
    return {(p.plan, p.kept_share): p for p in found}


def test_silhouettes_are_found_without_the_truth(drawing, images):
    found = pose.silhouettes(images)
    assert pose.overlap(found, drawing.truth.masks).mean() > 0.85
    # Neither a constant image nor the colors of object and background exchanged confuse it.
    assert not pose.silhouettes(torch.full((2, 3, 8, 8), 0.3)).any()
    square = torch.zeros(1, 3, 8, 8)
    square[..., 2:6, 3:5] = 1
    expected = torch.zeros(1, 8, 8, dtype=torch.bool)
    expected[:, 2:6, 3:5] = True
    assert torch.equal(pose.silhouettes(square), expected)
    assert torch.equal(pose.silhouettes(1 - square), expected)


def test_overlap_is_one_for_a_copy_and_low_for_another_pose(drawing):
    masks = drawing.truth.masks
    torch.testing.assert_close(pose.overlap(masks, masks), torch.ones(len(masks)))
    assert pose.overlap(masks, masks.roll(3, 0)).mean() < 0.4
    a, b = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    a[:, 0], b[:, 0, :2] = True, True
    b[:, 1, 0] = True
    assert float(pose.overlap(a, b)) == pytest.approx(2 / 5)
    assert float(pose.overlap(a & ~a, a & ~a)) == 0


def test_colors_of_both_regions_are_means():
    image = torch.zeros(1, 3, 2, 2)
    image[0, 0] = torch.tensor([[1.0, 0.5], [0.2, 0.4]])
    mask = torch.tensor([[[True, True], [False, False]]])
    inside, outside = pose.region_colors(image, mask)[0]
    torch.testing.assert_close(inside, torch.tensor([0.75, 0.0, 0.0]))
    torch.testing.assert_close(outside, torch.tensor([0.3, 0.0, 0.0]))
    # Without an object its color is that of the whole image.
    inside, outside = pose.region_colors(image, mask & ~mask)[0]
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_way_of_a_color_is_its_share_of_the_other(share):
    kept, other = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0))
    color = (1 - share) * kept + share * other
    assert pose.other_color(color, kept, other) == pytest.approx(share, abs=1e-6)


def test_the_aligned_plan_is_the_one_that_align_mix_uses():
    rng = torch.Generator().manual_seed(0)
    A, perm = torch.randn(4, 6, 3, 3, generator=rng), torch.tensor([2, 3, 0, 1])
    masks = torch.zeros(4, SIDE, SIDE, dtype=torch.bool)
    R = plans.assignment(A, perm, "aligned", masks, eps=0.5, num_iters=50)
    expected = align_mix(A, perm, torch.tensor(0.0), eps=0.5, num_iters=50)
    torch.testing.assert_close(plans.carried(A, perm, R), expected)
    # To keep the partner's positions is to keep the anchor's with the two exchanged.
    back = align_mix(A, perm, torch.tensor(1.0), keep="partner", eps=0.5, num_iters=50)
    torch.testing.assert_close(back[perm], expected, rtol=1e-4, atol=1e-4)


def test_the_ways_are_drawn_through_their_points(points):
    rng = np.random.default_rng(0)
    examples = {name: list(rng.random((2, 4, 4, 3))) for name in ("kept", "other")}
    figure = draw_pose(list(points.values()), examples, "title")
    axes, *pictures = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    for plan in PLANS:
        way = [points[plan, share] for share in (1.0, 0.5, 0.0)]
        np.testing.assert_allclose(lines[plan], [(p.appearance, p.pose) for p in way])
    drawn = [np.asarray(p.images[0].get_array()) for p in pictures]
    expected = [examples[name][row] for row in range(2) for name in ("kept", "other")]
    np.testing.assert_array_equal(drawn, expected)
    assert [p.get_title() for p in pictures[:2]] == ["kept", "other"]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_keeps_the_mean_over_positions(plan, drawing):
    A = torch.randn(6, 5, 4, 4, generator=torch.Generator().manual_seed(1))
    perm = torch.arange(6).roll(3)
    R = plans.assignment(A, perm, plan, drawing.truth.masks[:6])
    assert R.min() >= 0
    torch.testing.assert_close(R.sum(1), torch.ones(6, 16), rtol=0, atol=1e-4)
    moved = plans.carried(A, perm, R)
    torch.testing.assert_close(moved.mean((2, 3)), A[perm].mean((2, 3)), rtol=0, atol=1e-4)
    if plan == "unaligned":
        assert torch.equal(moved, A[perm])


def test_objects_meet_objects_under_the_oracle_alone(drawing):
    masks, perm = drawing.truth.masks[:80], torch.arange(80).roll(40)
    A = torch.randn(80, 5, 8, 8, generator=torch.Generator().manual_seed(1))
    match = {
        plan: plans.object_match(masks, perm, plans.assignment(A, perm, plan, masks))
        for plan in PLANS
    }
    assert match["oracle"] > 0.9
    for plan in ("random", "uniform", "aligned"):  # features that say nothing match nothing
        assert abs(match[plan]) < 0.15, plan
    assert 0.1 < match["unaligned"] < 0.6  # shapes do not touch the border


def test_with_a_perfect_painter_the_ends_of_the_ways_are_known(points):
    for plan in PLANS:
        kept = points[plan, 1.0]
        assert kept.pose == pytest.approx(1)
        assert kept.appearance == pytest.approx(0, abs=1e-6)
        assert kept.overlap_kept > 0.85
        assert kept.other_foreground == pytest.approx(0, abs=0.1)
    other = points["unaligned", 0.0]
    assert (other.pose, other.appearance) == pytest.approx((0, 1))
    assert other.overlap_other == pytest.approx(points["unaligned", 1.0].overlap_kept)
    assert other.overlap_kept < 0.4
    assert other.other_background == pytest.approx(1, abs=0.1)


def test_the_claim_holds_where_it_must_and_not_where_it_cannot(points):
    """Carried by the true silhouettes, pose stays and appearance goes; by chance, no pose."""
    oracle, random = points["oracle", 0.0], points["random", 0.0]
    assert oracle.pose > 0.5
    assert oracle.appearance > 0.8
    assert oracle.swapped < 0.2
    assert oracle.overlap_kept > oracle.overlap_other + 0.2
    assert random.pose < 0.2


def test_pose_at_half_is_read_off_the_way():
    def point(share, pose_kept, appearance):
        return PosePoint("aligned", share, *[0.0] * 6, pose_kept, appearance)

    way = [point(0.0, 0.2, 0.8), point(1.0, 1.0, 0.0), point(0.5, 0.6, 0.4)]
    assert pose.pose_at_half(way, "aligned") == pytest.approx(0.5)
    short = [point(1.0, 1.0, 0.0), point(0.0, 0.9, 0.3)]
    assert pose.pose_at_half(short, "aligned") != pose.pose_at_half(short, "aligned")  # NaN
    lines = [json.loads(r.to_json()) for r in pose.pose_results(way, {"layer": "layer3"})]
    half = [r for r in lines if r["metric"] == "pose_at_half"]
    assert [(r["value"], r["settings"]) for r in half] == [
        (pytest.approx(0.5), {"plan": "aligned", "layer": "layer3"})
    ]
    there = {(r["metric"], r["settings"].get("kept_share")): r["value"] for r in lines}
    assert there["pose", 0.5] == 0.6
    assert there["appearance", 0.0] == 0.8


def test_what_has_no_square_map_or_no_such_plan_is_refused(drawing):
    perm, masks = torch.tensor([1, 0]), drawing.truth.masks[:2]
    with pytest.raises(ValueError, match="unknown plan 'optimal'"):
        plans.assignment(torch.rand(2, 3, 4, 4), perm, "optimal", masks)
    with pytest.raises(ValueError, match="square maps, got 6 positions"):
        plans.assignment(torch.rand(2, 3, 2, 3), perm, "oracle", masks)
