"""Correspondences: the assignment drawn is that of the features, line by line."""

import numpy as np
import pytest
from torch import nn

from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.experiments.run import train
from alignmixup.figures import sources
from alignmixup.figures.by_name import draw_figure
from alignmixup.figures.correspondences import AlignedPair, aligned_pair, draw_pairs, matches
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings


@pytest.fixture(scope="module")
def images():
    return shapes("test", 60)


@pytest.fixture(scope="module")
def net(images):
    spec = NetSpec("preact_resnet18", width=4, head="flatten")
    return build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()


def test_the_assignment_drawn_is_that_of_the_features(net, images):
    pair = aligned_pair(net, "layer4", images, 0, 1, num_iters=200)
    np.testing.assert_allclose(pair.assignment.sum(0), 1, atol=1e-4)
    pixels = images.images[0].permute(1, 2, 0).numpy() / 255
    np.testing.assert_allclose(pair.first, pixels, atol=1e-6)
    # An image and itself, with hardly any entropy: each position is matched with itself.
    same = aligned_pair(net, "layer4", images, 3, 3, eps=1e-6)
    np.testing.assert_allclose(same.assignment, np.eye(16), atol=1e-3)
    with pytest.raises(ValueError, match="drawn for maps"):
        aligned_pair(net, "head", images, 0, 1)


def test_matches_choose_each_other_and_have_mass():
    spread = np.full((4, 4), 0.25)
    assert matches(spread, 0.3) == []
    assert matches(np.eye(4), 0.3) == [(k, k, 1.0) for k in range(4)]
    # Two positions want the same one: the stronger has it.
    wanted = np.array([[0.9, 0.1], [0.6, 0.4]])
    assert matches(wanted, 0.3) == [(0, 0, 0.9)]


def test_correspondences_mark_both_ends_of_each_match():
    assignment = np.eye(4)[[2, 0, 3, 1]]
    pair = AlignedPair(np.zeros((8, 8, 3)), np.ones((8, 8, 3)), assignment, {"A": np.eye(8)})
    axes = draw_pairs([pair], "pair").axes[0]
    assert all(line.get_marker() == "o" for line in axes.lines)
    lines = [line.get_xydata() for line in axes.lines]
    # Centers of 2 x 2 cells of 4 pixels; the second image starts after a gap of 4 pixels.
    centers = [(1.5, 1.5), (5.5, 1.5), (1.5, 5.5), (5.5, 5.5)]
    for i, j in enumerate([2, 0, 3, 1]):
        start, end = lines[i]
        assert tuple(start) == centers[i]
        assert tuple(end) == (centers[j][0] + 12, centers[j][1])
    odd = AlignedPair(pair.first, pair.second, np.eye(3), {"A": np.eye(8)})
    with pytest.raises(ValueError, match="got 3 positions"):
        draw_pairs([odd], "odd")


def test_figures_of_a_run_use_its_network_its_images_and_its_settings(tmp_path):
    recipe = Recipe(
        key=RecipeKey("shapes", "r18", "alignmixup", "run"),
        data=DataSpec("shapes", limit=16),
        net=NetSpec("preact_resnet18", width=4),
        mixer=AlignMixup("layer3", num_iters=7),
        train=TrainSettings(epochs=1, batch_size=16, milestones=(), device="cpu"),
    )
    train(recipe, tmp_path / "run", quiet=True)
    source = sources.run_source(tmp_path / "run", None)
    assert len(source.images) == 16  # those that evaluate scores
    assert (source.layer, source.num_iters) == ("layer3", 7)
    assert source.what == "run shapes-r18-alignmixup-run, 1 epoch"
    png, pdf, caption = draw_figure("correspondences", tmp_path, run=tmp_path / "run")
    assert png.stat().st_size > 5000
    assert pdf.read_bytes().startswith(b"%PDF")
    text = " ".join(caption.read_text().split())
    assert "shapes-r18-alignmixup-run, 1 epoch" in text
    num_pairs = len(sources.different_pairs(source.images, 5))
    assert f"{num_pairs} pairs of different classes drawn at random" in text


def test_a_caption_says_that_there_are_fewer_pairs_than_asked_for():
    images = shapes("test", 12)
    num_pairs = len(sources.different_pairs(images, 9))
    assert num_pairs <= 6
    assert sources.drawn(num_pairs, 9).endswith("drawn at random: the images make no 9 such pairs.")
    assert sources.drawn(3, 3) == "3 pairs of different classes drawn at random."


@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_maps_of_few_channels_have_colors(channels):
    net = nn.Sequential(nn.Conv2d(3, channels, 3, stride=4), nn.ReLU())
    pair = aligned_pair(net, "0", shapes("test", 4), 0, 1)
    for picture in pair.maps.values():  # [h, w, 3]
        assert picture.shape == (8, 8, 3)
        assert (picture[..., channels:] == 0).all()
