"""What figures share: colors that stay apart, galleries, files."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alignmixup import figures
from alignmixup.figures import effect, localization, pose, reliability, toy
from alignmixup.figures.style import (
    PALETTE,
    STYLES,
    Picture,
    gallery,
    new_figure,
    save,
    use_style,
    write_title,
)

RNG = np.random.default_rng(0)

# Machado, Oliveira and Fernandes 2009, full severity, in linear RGB.
BLINDNESS = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "none": np.eye(3).tolist(),
}
CLEAR = 15  # a difference of color that is seen at a glance; 2.3 is just noticeable
TOGETHER = {
    "boxes": (localization.PREDICTED[0], localization.TRUE[0]),
    "gaps": (reliability.VERMILLION, reliability.BLUE),
    "parts": tuple(color for color, _ in effect.PARTS.values()),
    "plans": tuple(pose.COLOURS.values())[:4],
    "toy": (toy.BLUE, toy.VERMILLION),
}


def lab(color, blindness):
    """CIE L*a*b* of a color as somebody with this blindness sees it."""
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ linear / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("what", TOGETHER)
def test_colors_used_together_stay_apart_for_color_blind_readers(what, blindness):
    for a, b in itertools.combinations(TOGETHER[what], 2):
        assert np.linalg.norm(lab(a, blindness) - lab(b, blindness)) > CLEAR


def test_red_and_green_of_the_same_lightness_would_fail():
    """The measure itself: the boxes were once of these colors."""
    apart = [np.linalg.norm(lab("#d02020", b) - lab("#4c7a20", b)) for b in BLINDNESS]
    assert min(apart) < CLEAR < max(apart)


def test_every_color_is_of_the_palette():
    sources = sorted(Path(figures.__file__).parent.glob("*.py"))
    used = {c for path in sources for c in re.findall(r"#[0-9a-f]{6}", path.read_text())}
    assert used == set(PALETTE)
    assert not any(re.search(r'"(jet|hsv|rainbow)"', path.read_text()) for path in sources)


def texts(figure):
    drawn = [t.get_text() for axes in figure.axes for t in (axes.title, *axes.texts)]
    return drawn + ([figure._suptitle.get_text()] if figure._suptitle else [])


def test_save_writes_png_and_pdf_that_are_not_blank(tmp_path):
    figure = new_figure(6.4, 4.0)
    figure.subplots().plot([1, 2], [10.0, 30.0])
    png, pdf = save(figure, tmp_path / "new" / "curves")
    assert np.asarray(Image.open(png).convert("L"), dtype=float).var() > 100
    assert pdf.read_bytes().startswith(b"%PDF")


def test_a_gallery_has_each_title_caption_and_image_once():
    pictures = [Picture(f"m{k}", RNG.random((8, 8, 3)), f"cat {k}%") for k in range(7)]
    figure = gallery(pictures, "seven", columns=3)
    for picture in pictures:
        assert texts(figure).count(picture.title) == 1
        assert texts(figure).count(picture.caption) == 1
    drawn = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    for picture, image in zip(pictures, drawn, strict=True):
        np.testing.assert_array_equal(picture.image, image)


@pytest.mark.parametrize("name", [name for name in STYLES if name != "screen"])
def test_a_papers_figure_has_exactly_its_width_and_no_title(name, tmp_path):
    with use_style(name, ("svg", "pdf")) as style:
        figure = new_figure(12, 3)
        axes = figure.subplots()
        axes.set_title("panel")
        write_title(figure, "a title that is part of the caption")
        svg, pdf, text = save(figure, tmp_path / "wide", "What it shows.")
    assert figure._suptitle is None
    assert axes.title.get_fontsize() == style.font_size
    width, height = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg.read_text()).groups()
    np.testing.assert_allclose(
        [float(width), float(height)], 72 * style.width * np.array([1, 0.25])
    )
    assert pdf.read_bytes().startswith(b"%PDF")
    assert text.read_text() == "What it shows.\n"


def test_pictures_of_a_gallery_have_a_frame_and_empty_places_none():
    white = Picture("white", np.ones((4, 4, 3)), "")
    figure = gallery([white, white], "two of three", columns=3)
    *drawn, empty = figure.axes
    assert all(axes.axison and axes.spines["top"].get_visible() for axes in drawn)
    assert not any(axes.get_xticks().size for axes in drawn)
    assert not empty.axison


def test_a_gallery_in_a_narrow_column_has_fewer_columns():
    pictures = [Picture(f"m{k}", RNG.random((8, 8, 3)), "cat 65%, dog 35%") for k in range(7)]
    columns = {}
    for name in ("screen", "two-column"):
        with use_style(name):
            columns[name] = gallery(pictures, "seven").axes[0].get_gridspec().ncols
    assert columns == {"screen": 5, "two-column": 3}


def test_unknown_styles_and_formats_are_errors():
    with pytest.raises(ValueError, match="did you mean 'two-column'"), use_style("twocolumn"):
        pass
    with pytest.raises(ValueError, match="unknown format 'jpg'; choose from png, pdf, svg"):
        use_style("screen", ("jpg",)).__enter__()
