"""One pair under every method: pictures and captions are what the mixers gave."""

import dataclasses

import numpy as np
import pytest
import torch

from alignmixup.datasets import shapes
from alignmixup.experiments.painters import LayerDecoder, OwnDecoder
from alignmixup.figures.methods import (
    NO_IMAGE,
    _title,
    method_pictures,
    share_caption,
    small_style_network,
)
from alignmixup.figures.sources import Source, different_pairs
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.ops.align import align_mix
from alignmixup.registry import MIXERS

METHODS = {
    "AlignMixup",
    "Manifold mixup",
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
def source(images):
    spec = NetSpec("preact_resnet18", width=4, head="flatten")
    net = build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = LayerDecoder(net, "layer3", 32, channels=16).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():  # untrained, but not blank
        decoder.decoder.to_image.weight.normal_(0, 5, generator=rng)
    return Source(net, "layer3", images, "a small network", painter=decoder)


@pytest.fixture(scope="module")
def drawn(source):
    return method_pictures(source, seed=0, adain_steps=4)


@pytest.fixture(scope="module")
def pictures(drawn):
    return drawn.pictures


def test_the_gallery_shows_every_method_that_this_network_allows(drawn):
    anchor, partner, *mixed = drawn.pictures
    assert {p.title for p in mixed} >= METHODS
    assert NO_IMAGE.keys() < MIXERS.keys()
    titles = {_title(MIXERS[name]) for name in NO_IMAGE}
    # They need the embedding of an autoencoder, a pooled head, and a class token.
    others = {"AlignMixup/AE", "AlignMixup/VAE", "SnapMix", "TransMix"}
    assert drawn.left_out.keys() == titles | others
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


def test_mixed_features_are_shown_as_their_own_layer_decodes_them(source, pictures):
    anchor, partner, *mixed = pictures
    shown = {p.title: p for p in mixed}
    x = torch.from_numpy(np.stack([anchor.image, partner.image])).permute(0, 3, 1, 2)
    features = source.painter.features(x)
    for title, mix in (
        ("Manifold mixup", 0.65 * features[0] + 0.35 * features[1]),
        ("AlignMixup", align_mix(features, torch.tensor([1, 0]), torch.full((2,), 0.65))[0]),
    ):
        with torch.no_grad():
            painted = source.painter.paint(mix[None])[0].clamp(0, 1).permute(1, 2, 0)
        np.testing.assert_allclose(shown[title].image, painted.numpy(), atol=1e-4)
        assert shown[title].caption == f"{anchor.caption} 65%, {partner.caption} 35%"
    assert np.abs(shown["AlignMixup"].image - shown["Manifold mixup"].image).max() > 1e-3


@pytest.mark.parametrize("embedding", ["vector", "tensor"])
@pytest.mark.parametrize("variational", [False, True])
def test_a_method_with_an_autoencoder_shows_the_decoded_aligned_mix(
    images, monkeypatch, embedding, variational
):
    """For every seed: it showed the images of input mixup where that case was drawn."""
    title, name = (("AlignMixup/AE", "AlignMixupAE"), ("AlignMixup/VAE", "AlignMixupVAE"))[
        variational
    ]
    spec = NetSpec("preact_resnet18", width=4, autoencoder=embedding, variational=variational)
    net = build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()
    with torch.no_grad():  # untrained, but not blank
        net.decoder.to_image.weight.normal_(0, 5, generator=torch.Generator().manual_seed(0))
    source = Source(net, "encoder", images, "an autoencoder", painter=OwnDecoder(net))
    monkeypatch.setattr(MIXERS, "_entries", {name: MIXERS[name]})
    for seed in range(4):
        drawn = method_pictures(source, seed=seed, adain_steps=2)
        assert not drawn.left_out
        anchor, partner, picture = drawn.pictures
        x = torch.from_numpy(np.stack([anchor.image, partner.image])).permute(0, 3, 1, 2)
        features = source.painter.features(x)
        mix = align_mix(features, torch.tensor([1, 0]), torch.full((2,), 0.65))
        with torch.no_grad():
            painted = source.painter.paint(mix)[0].clamp(0, 1).permute(1, 2, 0)
        assert picture.title == title
        np.testing.assert_allclose(picture.image, painted.numpy(), atol=1e-4)


def test_a_method_from_outside_is_shown_and_features_need_a_decoder(source, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Mine(InputMixup):
        """Mine (2030): as input mixup."""

    monkeypatch.setattr(MIXERS, "_entries", {"Mine": Mine, "AlignMixup": MIXERS["AlignMixup"]})
    blind = dataclasses.replace(source, painter=None)
    found = method_pictures(blind, seed=0, adain_steps=2)
    assert [p.title for p in found.pictures] == ["anchor", "partner", "Mine"]
    assert "no decoder" in found.left_out["AlignMixup"]


@pytest.mark.slow
def test_co_mixups_picture_shows_a_good_share_of_both(source):
    """On any pair; the picture in the documents is of one."""
    for seed in range(3):
        anchor, partner, *mixed = method_pictures(source, seed=seed, adain_steps=2).pictures
        (caption,) = [p.caption for p in mixed if p.title == "Co-Mixup"]
        shares = {name: float(share[:-1]) for name, share in map(str.split, caption.split(", "))}
        assert min(shares[anchor.caption], shares[partner.caption]) >= 15


def test_a_caption_names_the_largest_shares_of_a_label():
    names = ("a", "b", "c", "d", "e")
    assert share_caption(torch.tensor([0.1, 0.6, 0.0, 0.3, 0.001]), names) == "b 60%, d 30%, a 10%"
    spread = torch.tensor([0.05, 0.6, 0.05, 0.25, 0.05])
    assert share_caption(spread, names) == "b 60%, d 25%, a 5%, others 10%"


def test_pairs_are_of_different_classes_and_disjoint(images):
    pairs = different_pairs(images, 10, seed=1)
    assert len({i for pair in pairs for i in pair}) == 2 * len(pairs) == 20
    assert all(images.labels[i] != images.labels[j] for i, j in pairs)
    one = dataclasses.replace(
        images, images=images.images[:4], labels=images.labels[:1].repeat(4), boxes=None
    )
    with pytest.raises(ValueError, match="no two of the 4 images"):
        different_pairs(one, 1)


@pytest.mark.slow
def test_training_the_style_network_shows_progress(images, capsys):
    small_style_network(images, 20, seed=0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "style network: step 2 of 20"
    assert said[-1] == "style network: step 20 of 20"
