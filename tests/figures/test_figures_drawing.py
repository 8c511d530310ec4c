"""Drawing: what comes in is what is on the axes, and both files are written."""

import itertools

import numpy as np
import pytest
from PIL import Image

from alignmixup.figures import drawing as figures
from alignmixup.figures.drawing import LayerEffect, Picture, ToyAlignment

RNG = np.random.default_rng(0)


def texts(figure):
    drawn = [t.get_text() for axes in figure.axes for t in (axes.title, *axes.texts)]
    return drawn + ([figure._suptitle.get_text()] if figure._suptitle else [])


def test_save_writes_png_and_pdf_that_are_not_blank(tmp_path):
    figure = figures.training_curves({"a": [(1, 10.0), (2, 30.0)], "none yet": []}, "title")
    png, pdf = figures.save(figure, tmp_path / "new" / "curves.png")
    assert np.asarray(Image.open(png).convert("L"), dtype=float).var() > 100
    assert pdf.read_bytes().startswith(b"%PDF")
    (line, _) = figure.axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [10, 30])


def test_the_toy_figure_shows_the_arrays_it_is_given(tmp_path):
    sets = RNG.normal(size=(4, 6, 2))
    cost, plan = RNG.random((2, 6, 6))
    shares = (0.0, 0.5, 1.0)
    mixes = RNG.normal(size=(2, 3, 6, 2))
    toy = ToyAlignment(*sets[:2], cost, plan, *sets[2:], shares, *mixes)
    figure = figures.toy_alignment(toy, "toy")
    shown = [image.get_array() for axes in figure.axes[:15] for image in axes.images]
    np.testing.assert_array_equal(shown[0], cost)
    np.testing.assert_array_equal(shown[1], plan)
    for row, expected in ((1, mixes[0]), (2, mixes[1])):
        for k in range(3):
            points = figure.axes[5 * row + k].collections[-1].get_offsets()
            np.testing.assert_array_equal(points, expected[k])
    np.testing.assert_array_equal(figure.axes[3].collections[-1].get_offsets(), sets[2])
    np.testing.assert_array_equal(figure.axes[4].collections[-1].get_offsets(), sets[3])
    png, _ = figures.save(figure, tmp_path / "toy")
    assert np.asarray(Image.open(png).convert("L"), dtype=float).var() > 100


def test_a_gallery_has_each_title_caption_and_image_once():
    pictures = [Picture(f"m{k}", RNG.random((8, 8, 3)), f"cat {k}%") for k in range(7)]
    figure = figures.gallery(pictures, "seven", "a note", columns=3)
    for picture in pictures:
        assert texts(figure).count(picture.title) == 1
        assert texts(figure).count(picture.caption) == 1
    drawn = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    for picture, image in zip(pictures, drawn, strict=True):
        np.testing.assert_array_equal(picture.image, image)


def test_the_effect_bars_are_as_high_as_the_changes():
    effects = [LayerEffect("layer1", 0.4, 1e-7, 0.05, 0.9), LayerEffect("layer2", 0.3, 0, 1e-8, 0)]
    figure = figures.effect_by_layer({"net": effects}, "effect", 1e-3, "left out: layer0")
    top, bottom = figure.axes
    heights = [bar.get_height() for bar in top.patches]
    assert heights == [0.4, 0.3, 1e-7, figures.SMALLEST, 0.05, 1e-8]
    assert [bar.get_height() for bar in bottom.patches] == [0.9, 0]
    assert [t.get_text() for t in bottom.get_xticklabels()] == ["layer1", "layer2"]
    assert top.get_yscale() == "log"
    assert any("left out: layer0" in text for text in texts(figure))


@pytest.mark.parametrize(
    ("layers", "shown", "is_slanted"),
    [
        ([f"encoder.layer{i}" for i in (1, 2, 3, 4)], ["layer1", "layer2", "layer3", "layer4"], 0),
        (["encoder.layer3", "encoder"], ["encoder.layer3", "encoder"], 0),
        ([f"encoder.layer{i}" for i in (1, 2, 3)] + ["encoder"], None, 1),
    ],
)
def test_names_of_layers_do_not_touch(layers, shown, is_slanted):
    effects = [LayerEffect(layer, 0.4, 1e-7, 0.05, 0.9) for layer in layers]
    figure = figures.effect_by_layer({"net": effects}, "effect", 1e-3)
    for axes in figure.axes:
        labels = axes.get_xticklabels()
        assert [label.get_text() for label in labels] == (shown or layers)
        assert all(bool(label.get_rotation()) == is_slanted for label in labels)
    figure.draw_without_rendering()
    # Slanted ones begin below the others; level ones must leave a gap.
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert is_slanted or all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_correspondences_join_each_position_to_its_strongest_match():
    assignment = np.eye(4)[[2, 0, 3, 1]]
    pair = figures.AlignedPair(
        np.zeros((8, 8, 3)), np.ones((8, 8, 3)), assignment, {"A": np.eye(8)}
    )
    axes = figures.aligned_pairs([pair], "pair").axes[0]
    lines = [line.get_xydata() for line in axes.lines if len(line.get_xdata()) == 2]
    # Centres of 2 x 2 cells of 4 pixels; the second image starts after a gap of 2 pixels.
    centres = [(1.5, 1.5), (5.5, 1.5), (1.5, 5.5), (5.5, 5.5)]
    for i, j in enumerate([2, 0, 3, 1]):
        start, end = lines[i]
        assert tuple(start) == centres[i]
        assert tuple(end) == (centres[j][0] + 10, centres[j][1])
    odd = figures.AlignedPair(pair.first, pair.second, np.eye(3), {"A": np.eye(8)})
    with pytest.raises(ValueError, match="got 3 positions"):
        figures.aligned_pairs([odd], "odd")
