"""Localized objects: pictures show what the metric counts, boxes are drawn where they are."""

import dataclasses

import numpy as np
import pytest
import torch

from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.evaluation.tasks.localization import localization
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import BuiltIn
from alignmixup.figures.localization import (
    PREDICTED,
    TRUE,
    LocalizedPicture,
    draw_localization,
    localized_pictures,
)
from alignmixup.models import build
from alignmixup.models.zoo import NetSpec


@pytest.fixture(scope="module")
def images():
    return shapes("test", 50)


@pytest.fixture(scope="module")
def net(images):
    return build(NetSpec("wrn16_8", width=1), 10, images.mean, images.std, 32, seed=0).eval()


def test_the_pictures_show_what_the_metric_counts(net, images):
    pictures = localized_pictures(net, images, num_pictures=50)
    assert len(pictures) == 50
    results = localization(net, [(images.images / 255, images.labels)], images.boxes)
    top1 = next(r.value for r in results if r.metric == "top1_loc")
    is_found = [p.iou >= 0.5 and "(is:" not in p.caption for p in pictures]
    assert 100 * sum(is_found) / 50 == pytest.approx(top1)
    again = localized_pictures(net, images, num_pictures=3, seed=0)
    for a, b in zip(again, pictures, strict=False):
        assert a.caption == b.caption
        np.testing.assert_array_equal(a.image, b.image)
    assert all(0 <= p.heat.min() <= p.heat.max() <= 1 for p in pictures)
    boxless = dataclasses.replace(images, boxes=None)
    with pytest.raises(ValueError, match="shapes has no boxes"):
        localized_pictures(net, boxless)


def test_images_without_a_box_are_not_drawn(net, images):
    one = tuple(b if i == 7 else b[:0] for i, b in enumerate(images.boxes))
    (picture,) = localized_pictures(net, dataclasses.replace(images, boxes=one))
    shown = torch.from_numpy(picture.image).permute(2, 0, 1)
    assert torch.equal(shown, images.images[7] / 255)


@pytest.mark.slow
def test_reliability_and_localization_share_one_trained_network(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(built_in, "BUILT_IN", BuiltIn(num_train=50, num_test=40, wrn_epochs=1))
    said = {}
    for name in ("reliability", "localization"):
        assert main(["figure", name, "--out", str(tmp_path)]) == 0
        said[name] = capsys.readouterr().err
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "training a small network" in said["reliability"]
    assert "epoch 1/1" in said["reliability"]
    assert said["localization"] == ""
    # Another recipe, here another seed, has a folder of its own.
    assert main(["figure", "localization", "--out", str(tmp_path), "--seed", "1"]) == 0
    assert len(list((tmp_path / "built-in").iterdir())) == 2


@pytest.fixture
def picture():
    return LocalizedPicture(
        image=np.full((8, 8, 3), 0.25),
        heat=np.zeros((8, 8)),
        box=(1, 2, 5, 7),
        true_boxes=((0, 0, 8, 4), (2, 2, 3, 3)),
        iou=0.375,
        caption="ant",
    )


def test_boxes_are_drawn_on_the_image_and_on_its_map(picture):
    figure = draw_localization([picture] * 5, "five")
    axes = figure.axes[0]
    from matplotlib.colors import to_hex

    drawn = [
        ((to_hex(p.get_edgecolor()), p.get_linestyle()), *p.get_xy(), p.get_width(), p.get_height())
        for p in axes.patches
    ]
    gap = 8 + 1
    assert drawn[:3] == [
        (TRUE, -0.5, -0.5, 8, 4),
        (TRUE, 1.5, 1.5, 1, 1),
        (PREDICTED, 0.5, 1.5, 4, 5),
    ]
    assert drawn[3:] == [(c, x + gap, y, w, h) for c, x, y, w, h in drawn[:3]]
    assert axes.get_title() == "ant\nIoU 0.38"
    shown = np.asarray(axes.images[0].get_array())
    assert (shown[:, :8] == 0.25).all()
    assert (shown[:, 8] == 1).all()
    assert np.ptp(shown[:, 9:], axis=(0, 1)).max() == 0  # one color for a map of zeros
    assert shown[0, 9, 2] > shown[0, 9, 0]
    assert len(figure.axes) == 8  # two rows of four, the last three empty


def test_nothing_found_is_said(picture):
    figure = draw_localization([dataclasses.replace(picture, box=None, iou=0.0)], "one")
    assert figure.axes[0].get_title() == "ant\nnothing found"
    assert len(figure.axes[0].patches) == 4
