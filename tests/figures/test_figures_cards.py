"""Pictures for the cards: what is drawn is what the mixers give, and every card has its picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from alignmixup.datasets import shapes
from alignmixup.figures import cards, sources
from alignmixup.figures.card_features import carried_patches
from alignmixup.figures.card_pair import Card, Pair, heat_maps
from alignmixup.figures.cards import CARDS
from alignmixup.figures.sources import Source
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.registry import MIXERS

DOCS = Path(__file__).parents[2] / "docs"
# Mixers that share the card of another; no mixing has none.
SHARED = {
    "AlignMixupVAE": "alignmixup_ae",
    "DenseMultiMix": "multimix",
    "LabelSmoothing": "oneof",
    "StyleCutMix": "stylemix",
}
OURS = sorted(
    name
    for name, mixer in MIXERS.items()
    if mixer.__module__.startswith("alignmixup.mixers.") and name != "NoMix"
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    images = shapes("test", 60)
    spec = NetSpec("preact_resnet18", width=4)
    net = build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()
    return Pair.of(Source(net, "layer4", images, "a small network"), 0, 4, block_steps=2)


@pytest.fixture(scope="module")
def drawn(pair: Pair) -> dict[str, Card]:
    return {name: make(pair) for name, make in CARDS.items()}


@pytest.mark.parametrize("name", CARDS)
def test_every_card_shows_what_its_method_does(drawn: dict[str, Card], name: str) -> None:
    card = drawn[name]
    assert len(card.pictures) >= 4
    assert len(card.title.split()) <= 12
    for picture in card.pictures:
        assert max(len(picture.title.split()), len(picture.caption.split())) <= 12
        assert picture.image.ndim == 3
        assert 0 <= picture.image.min() <= picture.image.max() <= 1
    pictures = [p.image for p in card.pictures if p.image.shape == card.pictures[0].image.shape]
    # Each is worth its place; where saliency is nearly even, some masks of a search may agree, and
    # two labels of one image are shown beside each other.
    num_copies = sum(
        any(np.abs(image - other).max() < 0.01 for other in pictures[:k])
        for k, image in enumerate(pictures)
    )
    # A block that has not learned makes even masks.
    searched = ("puzzlemix", "comixup", "automix", "samix", "adautomix")
    assert num_copies <= (2 if name in searched else name in ("transmix", "tokenmix"))


def test_captions_are_the_soft_labels(pair: Pair, drawn: dict[str, Card]) -> None:
    anchor, partner = pair.clean()
    card = drawn["input_mixup"]
    assert [p.title for p in card.pictures[1:4]] == ["lam = 0.75", "lam = 0.5", "lam = 0.25"]
    expected = f"{anchor.caption} 75%, {partner.caption} 25%"
    assert card.pictures[1].caption == expected
    blend = 0.75 * anchor.image + 0.25 * partner.image
    np.testing.assert_allclose(card.pictures[1].image, blend, atol=1e-6)
    cut = drawn["cutmix"].pictures[2]
    is_anchor = (cut.image == anchor.image).all(-1)
    assert cut.caption.startswith(f"{anchor.caption} {is_anchor.mean():.0%}, ")


def test_cards_leave_the_network_as_it_was(pair: Pair) -> None:
    before = {name: value.clone() for name, value in pair.net.state_dict().items()}
    CARDS["automix"](pair)
    assert all(p.requires_grad for p in pair.net.parameters())
    assert not pair.net._forward_pre_hooks
    for name, value in pair.net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_patches_are_carried_by_the_plan() -> None:
    image = np.arange(48.0).reshape(4, 4, 3) / 48
    np.testing.assert_allclose(carried_patches(np.eye(4), image), image)
    moved = carried_patches(np.eye(4)[[3, 2, 1, 0]], image)
    np.testing.assert_allclose(moved[:2, :2], image[2:, 2:])
    mean = carried_patches(np.full((4, 4), 0.25), image)
    np.testing.assert_allclose(mean[:2, :2], mean[2:, 2:])


def test_colors_of_heat() -> None:
    heat = heat_maps(torch.tensor([[[0.0, 1 / 3, 2 / 3, 1.0]]]))[0, 0]
    np.testing.assert_allclose(heat, [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]], atol=1e-6)


def test_the_figure_writes_all_of_them_and_shows_progress(
    tmp_path: Path,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sources.datasets, "shapes", lambda split: pair.images)

    def refuse(pair: Pair) -> Card:
        raise ValueError("no such layer")

    monkeypatch.setattr(cards, "CARDS", {"cutout": CARDS["cutout"], "mine": refuse})
    monkeypatch.setattr(cards, "CARD_STEPS", 2)
    written = cards.cards(tmp_path)
    assert [p.relative_to(tmp_path) for p in written] == [
        Path("methods/cutout.png"),
        Path("methods/cutout.pdf"),
        Path("methods/cutout.txt"),
    ]
    assert written[0].stat().st_size > 5000
    said = capsys.readouterr().err
    assert "style network: step 2 of 2" in said
    assert "card 1 of 2: cutout" in said
    assert "mine is not drawn: no such layer" in said


@pytest.mark.parametrize("name", OURS)
def test_the_card_of_every_mixer_has_a_picture_with_a_description(name: str) -> None:
    stem = SHARED.get(name, MIXERS[name].__module__.rpartition(".")[2])
    card = DOCS / "methods" / f"{stem}.md"
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", card.read_text(encoding="utf-8"))
    assert pictures
    for description, path in pictures:
        assert len(description.split()) >= 3
        assert 5_000 < (card.parent / path).stat().st_size < 250_000
    if stem != "alignmixup_ae":  # which shows decoded images
        assert stem in CARDS
        assert f"../figures/methods/{stem}.png" in [path for _, path in pictures]
