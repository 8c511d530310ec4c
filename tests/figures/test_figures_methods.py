"""One pair under every method: pictures and captions are what the mixers gave."""

import dataclasses

import numpy as np
import pytest

from alignmixup.datasets import shapes
from alignmixup.figures.methods import method_pictures, small_style_network
from alignmixup.figures.sources import different_pairs
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec

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
    return method_pictures(net, images, seed=0, adain_steps=4)


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


@pytest.mark.slow
def test_co_mixups_picture_shows_a_good_share_of_both(net, images):
    """On any pair; the picture in the documents is of one."""
    for seed in range(3):
        anchor, partner, *mixed = method_pictures(net, images, seed=seed, adain_steps=2)
        (caption,) = [p.caption for p in mixed if p.title == "Co-Mixup"]
        shares = {name: float(share[:-1]) for name, share in map(str.split, caption.split(", "))}
        assert min(shares[anchor.caption], shares[partner.caption]) >= 15


def test_pairs_are_of_different_classes_and_disjoint(images):
    pairs = different_pairs(images, 10, seed=1)
    assert len({i for pair in pairs for i in pair}) == 2 * len(pairs) == 20
    assert all(images.labels[i] != images.labels[j] for i, j in pairs)
    one = dataclasses.replace(
        images, images=images.images[:4], labels=images.labels[:1].repeat(4), boxes=None
    )
    with pytest.raises(ValueError, match="no two of the 4 images"):
        different_pairs(one, 1)


def test_training_the_style_network_shows_progress(images, capsys):
    small_style_network(images, 20, seed=0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "style network: step 2 of 20"
    assert said[-1] == "style network: step 20 of 20"
