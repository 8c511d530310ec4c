"""Figures: the numbers drawn are the solver's and the mixers' own, and pictures are written."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.experiments.run import Sets, train
from alignmixup.figures import registry as figures
from alignmixup.mixers import AlignMixup
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.ops import pairwise_cost, sinkhorn
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings

METHODS = {
    "Input mixup",
    "Cutout",
    "CutMix",
    "SaliencyMix",
    "PuzzleMix",
    "Co-Mixup",
    "StyleMix",
    "StyleCutMix",
}


@pytest.fixture(scope="module")
def images():
    return shapes("test", 60)


@pytest.fixture(scope="module")
def net(images):
    spec = NetSpec("preact_resnet18", width=4, head="flatten")
    return build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()


@pytest.fixture(scope="module")
def pictures(net, images):
    return figures.method_pictures(net, images, seed=0, adain_steps=4)


@pytest.fixture
def small(monkeypatch, images):
    """Less of everything that takes time."""
    monkeypatch.setattr(figures.datasets, "shapes", lambda split: images)
    monkeypatch.setattr(figures, "EFFECT_IMAGES", 2)
    monkeypatch.setattr(figures.methods, "__kwdefaults__", {**KEPT, "adain_steps": 4})


KEPT = dict(figures.methods.__kwdefaults__)


def check_drawn(paths, name):
    assert [p.name for p in paths] == [f"{name}.png", f"{name}.pdf"]
    pixels = np.asarray(Image.open(paths[0]).convert("RGB"), dtype=float)
    assert min(pixels.shape[:2]) > 300
    assert pixels.var() > 100
    assert paths[1].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("seed", [0, 1])
def test_the_toy_numbers_are_those_of_the_solver(seed):
    toy = figures.toy_arrays(seed)
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
    toy = figures.toy_arrays()
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
    assert np.abs(toy.first - figures.toy_arrays(1).first).max() > 0.1


def test_the_gallery_shows_every_method_that_mixes_images(pictures):
    anchor, partner, *mixed = pictures
    assert {p.title for p in mixed} == METHODS
    assert anchor.caption != partner.caption
    for picture in mixed:
        assert picture.image.shape == (32, 32, 3)
        assert 0 <= picture.image.min() <= picture.image.max() <= 1, picture.title
        assert np.abs(picture.image - anchor.image).max() > 0.05, picture.title
        assert np.abs(picture.image - partner.image).max() > 0.05, picture.title


def test_the_captions_are_the_shares_of_what_is_shown(pictures):
    anchor, partner, *mixed = pictures
    shown = {p.title: p for p in mixed}
    assert shown["Input mixup"].caption == f"{anchor.caption} 65%, {partner.caption} 35%"
    blend = 0.65 * anchor.image + 0.35 * partner.image
    np.testing.assert_allclose(shown["Input mixup"].image, blend, atol=1e-6)
    assert shown["Cutout"].caption == f"{anchor.caption} 100%"
    for title in ("CutMix", "SaliencyMix"):
        image = shown[title].image
        is_anchor = (image == anchor.image).all(-1)
        assert (is_anchor | (image == partner.image).all(-1)).all()
        assert shown[title].caption.startswith(f"{anchor.caption} {is_anchor.mean():.0%}, ")
    for picture in (anchor, partner):
        assert picture.caption in shown["Co-Mixup"].caption


def test_co_mixups_picture_shows_a_good_share_of_both(net, images):
    """On any pair; the picture in the documents is of one."""
    for seed in range(3):
        anchor, partner, *mixed = figures.method_pictures(net, images, seed=seed, adain_steps=2)
        (caption,) = [p.caption for p in mixed if p.title == "Co-Mixup"]
        shares = {name: float(share[:-1]) for name, share in map(str.split, caption.split(", "))}
        assert min(shares[anchor.caption], shares[partner.caption]) >= 15


def test_pairs_are_of_different_classes_and_disjoint(images):
    pairs = figures.different_pairs(images, 10, seed=1)
    assert len({i for pair in pairs for i in pair}) == 2 * len(pairs) == 20
    assert all(images.labels[i] != images.labels[j] for i, j in pairs)
    one = dataclasses.replace(
        images, images=images.images[:4], labels=images.labels[:1].repeat(4), boxes=None
    )
    with pytest.raises(ValueError, match="no two of the 4 images"):
        figures.different_pairs(one, 1)


def test_the_assignment_drawn_is_that_of_the_features(net, images):
    pair = figures.aligned_pair(net, "layer4", images, 0, 1, num_iters=200)
    np.testing.assert_allclose(pair.assignment.sum(0), 1, atol=1e-4)
    pixels = images.images[0].permute(1, 2, 0).numpy() / 255
    np.testing.assert_allclose(pair.first, pixels, atol=1e-6)
    # An image and itself, with hardly any entropy: each position is matched with itself, where no
    # two look alike.
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, images.images.shape, dtype=torch.uint8, generator=rng)
    noise = dataclasses.replace(images, images=pixels)
    same = figures.aligned_pair(net, "layer4", noise, 3, 3, eps=1e-4)
    np.testing.assert_allclose(same.assignment, np.eye(16), atol=1e-3)
    with pytest.raises(ValueError, match="drawn for maps"):
        figures.aligned_pair(net, "head", images, 0, 1)


def test_alignment_before_a_pooled_head_changes_nothing_and_before_a_flattened_one_does(small):
    logits = {}
    for head in ("pool", "flatten"):
        effects, left_out = figures.layer_effects(figures._source(None, 0, None, head=head))
        assert [e.layer for e in effects] == ["layer1", "layer2", "layer3", "layer4"]
        assert not left_out
        logits[head] = effects[-1].logits
    assert logits["pool"] < 1e-5
    assert logits["flatten"] > 1e-2


def test_layers_too_large_to_measure_are_named(small, monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "MOST_POSITIONS", 64)
    effects, left_out = figures.layer_effects(figures._source(None, 0, None))
    assert left_out == ["layer1", "layer2"]
    assert [e.layer for e in effects] == ["layer3", "layer4"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("preact_resnet18", [f"encoder.layer{i}" for i in (1, 2, 3, 4)]),
        # Its normalisation and ReLU come after the last stage: another map.
        ("wrn16_8", [*(f"encoder.layer{i}" for i in (1, 2, 3)), "encoder"]),
    ],
)
def test_a_map_with_two_names_is_measured_once(images, monkeypatch, name, layers):
    monkeypatch.setattr(figures, "EFFECT_IMAGES", 2)
    spec = NetSpec(name, width=4, autoencoder="vector")
    net = build(spec, 10, images.mean, images.std, 32).eval()
    source = figures.Source(net, "encoder", images, "autoencoder", num_iters=5)
    assert [e.layer for e in figures.layer_effects(source)[0]] == layers


def test_help_names_every_figure(capsys):
    with pytest.raises(SystemExit):
        main(["figure", "--help"])
    described = capsys.readouterr().out
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in figures.FIGURES:
        assert f"{name}:" in described
        assert name in listed


# The other figures have tests of their own.
@pytest.mark.parametrize("name", ["toy", "methods", "correspondences", "effect"])
def test_each_figure_from_the_command_line(small, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "MOST_POSITIONS", 64)
    assert main(["figure", name, "--out", str(tmp_path / "out"), "--seed", "0"]) == 0
    paths = [tmp_path / "out" / f"{name}{end}" for end in (".png", ".pdf")]
    assert capsys.readouterr().out.split() == [str(p) for p in paths]
    check_drawn(paths, name)


def test_figures_of_a_run_use_its_network_and_its_settings(small, tmp_path, images):
    recipe = Recipe(
        name="tiny-run",
        data=DataSpec("shapes"),
        net=NetSpec("preact_resnet18", width=4),
        mixer=AlignMixup("layer3", num_iters=7),
        train=TrainSettings(epochs=1, batch_size=16, milestones=(), device="cpu"),
    )
    train(recipe, tmp_path / "run", sets=Sets(shapes("train", 16), images), quiet=True)
    source = figures._source(tmp_path / "run", 0, None)
    assert (source.layer, source.num_iters) == ("layer3", 7)
    assert source.what == "run tiny-run, 1 epoch"
    written = figures.draw_figure("correspondences", tmp_path, run=tmp_path / "run")
    check_drawn(written, "correspondences")
    with pytest.raises(ValueError, match="drawn from points alone"):
        figures.draw_figure("toy", tmp_path, run=tmp_path / "run")
