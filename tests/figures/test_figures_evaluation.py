"""Figures of evaluations: the diagrams are those of the results, the boxes those of the task."""

import dataclasses

import numpy as np
import pytest
import torch

from alignmixup.datasets import shapes
from alignmixup.evaluation.tasks.localization import localization
from alignmixup.experiments.run import Sets, train
from alignmixup.experiments.scoring import evaluate
from alignmixup.figures import evaluation as figures
from alignmixup.mixers import NoMix
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings


@pytest.fixture(scope="module")
def images():
    return shapes("test", 50)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    recipe = Recipe(
        name="small",
        data=DataSpec("shapes"),
        net=NetSpec("wrn16_8", width=1),
        mixer=NoMix(),
        train=TrainSettings(epochs=1, batch_size=16, milestones=(), device="cpu"),
    )
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(recipe, folder, sets=Sets(shapes("train", 32), images), quiet=True)
    return folder


@pytest.fixture
def small(monkeypatch, images):
    monkeypatch.setattr(figures.datasets, "load", lambda name, split, root: images)


def drawn_panels(monkeypatch):
    seen = []
    draw = figures.drawing.reliability_diagrams

    def keep(panels, title):
        seen.append((panels, title))
        return draw(panels, title)

    monkeypatch.setattr(figures.drawing, "reliability_diagrams", keep)
    return seen


def test_the_panels_are_those_of_the_results(run, images):
    done = evaluate(run, images, tasks=["calibration", "temperature"], device="cpu")
    plain, scaled = figures.reliability_panels(done.results)
    assert sum(plain.counts) == 50
    assert sum(scaled.counts) == 25
    share = np.array(plain.counts) / 50
    gap = np.abs(np.array(plain.confidence) - np.array(plain.accuracy))
    ece = 100 * float((share * gap).sum())
    assert done.value("calibration", "ece") == pytest.approx(ece)
    assert f"ECE {ece:.2f} %" in plain.note
    assert f"OE {done.value('calibration', 'oe'):.2f} %" in plain.note
    assert f"temperature {done.value('temperature', 'temperature'):.2f}" in scaled.title
    # Of repeated measurements the newest is drawn.
    old = dataclasses.replace(done.results[0], date="1999", value=99.0)
    assert figures.reliability_panels([*done.results, old])[0] == plain
    with pytest.raises(ValueError, match="evaluate calibration first"):
        figures.reliability_panels([])


def test_a_run_is_drawn_from_its_record_or_else_measured(run, images, small, tmp_path, monkeypatch):
    seen = drawn_panels(monkeypatch)
    lines = (run / "results.jsonl").read_text().splitlines()
    kept = [line for line in lines if "reliability" not in line]
    (run / "results.jsonl").write_text("\n".join(kept) + "\n")
    written = figures.reliability(tmp_path, run=run)
    assert [p.name for p in written] == ["reliability.png", "reliability.pdf"]
    assert written[0].stat().st_size > 10_000
    evaluate(run, images, tasks=["calibration"], device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(figures, "evaluate", lambda *_, **__: pytest.fail("measured again"))
        figures.reliability(tmp_path, run=run)
    (measured, title), (recorded, _) = seen
    assert [recorded[0].title] == [f"shapes/test, {len(images)} images"]
    assert [dataclasses.replace(recorded[0], title=measured[0].title)] == measured[:1]
    assert "small" in title


def test_the_pictures_show_what_the_metric_counts(images):
    net = build(NetSpec("wrn16_8", width=1), 10, images.mean, images.std, 32, seed=0).eval()
    pictures = figures.localized_pictures(net, images, num_pictures=50)
    assert len(pictures) == 50
    results = localization(net, [(images.images / 255, images.labels)], images.boxes)
    top1 = next(r.value for r in results if r.metric == "top1_loc")
    is_found = [p.iou >= 0.5 and "(is:" not in p.caption for p in pictures]
    assert 100 * sum(is_found) / 50 == pytest.approx(top1)
    again = figures.localized_pictures(net, images, num_pictures=3, seed=0)
    for a, b in zip(again, pictures, strict=False):
        assert a.caption == b.caption
        np.testing.assert_array_equal(a.image, b.image)
    assert all(0 <= p.heat.min() <= p.heat.max() <= 1 for p in pictures)
    boxless = dataclasses.replace(images, boxes=None)
    with pytest.raises(ValueError, match="shapes has no boxes"):
        figures.localized_pictures(net, boxless)


def test_images_without_a_box_are_not_drawn(images):
    net = build(NetSpec("wrn16_8", width=1), 10, images.mean, images.std, 32, seed=0).eval()
    one = tuple(b if i == 7 else b[:0] for i, b in enumerate(images.boxes))
    (picture,) = figures.localized_pictures(net, dataclasses.replace(images, boxes=one))
    shown = torch.from_numpy(picture.image).permute(2, 0, 1)
    assert torch.equal(shown, images.images[7] / 255)


def test_localisation_of_a_run_is_drawn(run, small, tmp_path):
    written = figures.localization(tmp_path, run=run, seed=3)
    assert [p.name for p in written] == ["localization.png", "localization.pdf"]
    assert written[0].stat().st_size > 10_000
