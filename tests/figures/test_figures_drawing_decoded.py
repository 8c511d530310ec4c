"""Drawing decoded features: every picture and every point that comes in is there."""

import numpy as np
from PIL import Image

from alignmixup.figures import drawing as figures, drawing_decoded as decoded_figures
from alignmixup.figures.drawing_decoded import Interpolation, Way

RNG = np.random.default_rng(0)
SHARES = (0.0, 0.5, 1.0)


def pair():
    def mixes():
        return {name: RNG.random((3, 4, 4, 3)) for name in ("unaligned", "aligned")}

    return Interpolation(*RNG.random((2, 4, 4, 3)), SHARES, mixes(), mixes())


def test_every_mix_is_in_its_row_and_column(tmp_path):
    pairs = [pair(), pair()]
    figure = decoded_figures.interpolation_grid(pairs, "title", "note")
    (axes,) = figure.axes
    placed = {}
    for image in axes.images:
        left, _, _, top = image.get_extent()
        placed[round(top, 3), round(left, 3)] = np.asarray(image.get_array())
    assert len(placed) == 2 * (2 + 2 * 2 * 3)
    tops = sorted({top for top, left in placed if left > 2.5})
    assert len(tops) == 4
    for number, given in enumerate(pairs):
        for row, name in enumerate(("unaligned", "aligned")):
            lefts = sorted(left for top, left in placed if top == tops[2 * number + row])
            lefts = [left for left in lefts if left > 2.5]
            shown = np.stack([placed[tops[2 * number + row], left] for left in lefts])
            expected = np.concatenate([given.keep_first[name], given.keep_second[name]])
            np.testing.assert_array_equal(shown, expected)
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("unaligned") == texts.count("aligned") == 2
    assert texts.count("0.5") == 2
    assert [t for t in texts if "positions of" in t] == [
        r"positions of $x$ kept, $\lambda$ =",
        r"positions of $x'$ kept, $\lambda$ =",
    ]
    png, _ = figures.save(figure, tmp_path / "grid")
    assert np.asarray(Image.open(png).convert("L"), dtype=float).var() > 100


def test_the_ways_are_drawn_through_their_points(tmp_path):
    ways = [
        Way("aligned", SHARES[::-1], (0.0, 0.4, 0.8), (1.0, 0.6, 0.2)),
        Way("random", SHARES[::-1], (0.0, 0.3, 0.7), (1.0, 0.1, -0.2)),
    ]
    examples = {"kept": list(RNG.random((2, 4, 4, 3))), "other": list(RNG.random((2, 4, 4, 3)))}
    figure = decoded_figures.pose_ways(ways, examples, "title")
    axes, *pictures = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    for way in ways:
        np.testing.assert_allclose(lines[way.plan], np.stack([way.appearance, way.pose], axis=1))
    shown = [np.asarray(p.images[0].get_array()) for p in pictures]
    expected = [examples[name][row] for row in range(2) for name in ("kept", "other")]
    for drawn, given in zip(shown, expected, strict=True):
        np.testing.assert_array_equal(drawn, given)
    assert [p.get_title() for p in pictures[:2]] == ["kept", "other"]
    png, _ = figures.save(figure, tmp_path / "pose")
    assert np.asarray(Image.open(png).convert("L"), dtype=float).var() > 100
