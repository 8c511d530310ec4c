"""Pictures for the cards: what is drawn is what the mixers give, and every card has its picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from alignmixup.datasets import shapes
from alignmixup.figures import cards, sources
from alignmixup.figures.cards import CARDS, Pair, heat_maps
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pair() -> Pair:
    images = shapes("test", 60)
    spec = NetSpec("preact_resnet18", width=4)
    net = build(spec, images.num_classes, images.mean, images.std, 32, seed=0).eval()
    return Pair.of(net, images, seed=0, adain_steps=4)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_shows_what_its_method_does(pair: Pair, name: str) -> None:
    card = CARDS[name](pair)
    assert len(card.pictures) >= 5
    for picture in card.pictures:
        assert picture.image.ndim == 3
        assert 0 <= picture.image.min() <= picture.image.max() <= 1
    pictures = [p.image for p in card.pictures if p.image.shape == card.pictures[0].image.shape]
    # Each is worth its place; where saliency is nearly even, some masks of a search may agree.
    num_copies = sum(
        any(np.abs(image - other).max() < 0.01 for other in pictures[:k])
        for k, image in enumerate(pictures)
    )
    assert num_copies <= (2 if name in ("puzzlemix", "comixup") else 0)


def test_captions_are_the_soft_labels(pair: Pair) -> None:
    anchor, partner = pair.clean()
    card = CARDS["input_mixup"](pair)
    assert [p.title for p in card.pictures[1:4]] == ["lam = 0.75", "lam = 0.5", "lam = 0.25"]
    expected = f"{anchor.caption} 75%, {partner.caption} 25%"
    assert card.pictures[1].caption == expected
    blend = 0.75 * anchor.image + 0.25 * partner.image
    np.testing.assert_allclose(card.pictures[1].image, blend, atol=1e-6)
    cut = CARDS["cutmix"](pair).pictures[2]
    is_anchor = (cut.image == anchor.image).all(-1)
    assert cut.caption.startswith(f"{anchor.caption} {is_anchor.mean():.0%}, ")


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
    monkeypatch.setattr(cards, "CARDS", {"cutout": CARDS["cutout"]})
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
    assert "card 1 of 1: cutout" in said


@pytest.mark.parametrize("name", CARDS)
def test_every_card_of_the_documents_has_its_picture(name: str) -> None:
    text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"(../figures/methods/{name}.png)" in text
    assert (DOCS / "figures" / "methods" / f"{name}.png").stat().st_size < 150_000
