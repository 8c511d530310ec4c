"""Figures by name: they register themselves, and the command line draws and lists them."""

import numpy as np
import pytest
from PIL import Image

from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import BuiltIn
from alignmixup.figures import by_name, effect, methods, sources, style
from alignmixup.figures.by_name import draw_figure, list_figures, register_figure
from alignmixup.registry import FIGURES


@pytest.fixture
def small(monkeypatch):
    """Less of everything that takes time."""
    monkeypatch.setattr(sources.datasets, "shapes", lambda split, n=None: shapes(split, n or 60))
    monkeypatch.setattr(effect, "NUM_IMAGES", 2)
    monkeypatch.setattr(effect, "MOST_POSITIONS", 64)
    monkeypatch.setattr(methods, "ADAIN_STEPS", 4)
    tiny = BuiltIn(width=4, epochs=1, decoder_epochs=1, num_train=64, num_test=40)
    monkeypatch.setattr(built_in, "BUILT_IN", tiny)


def test_a_figure_from_outside_is_listed_and_drawn(tmp_path, monkeypatch, capsys):
    assert "toy" in FIGURES  # all of ours are there
    monkeypatch.setattr(FIGURES, "_entries", dict(FIGURES._entries))
    monkeypatch.setattr(by_name, "_about", dict(by_name._about))

    @register_figure("mine", about="a figure of my own")
    def mine(out, *, run=None, seed=0, data_root=None):
        path = out / "mine.txt"
        path.write_text(f"{run} {seed} {data_root}")
        return [path]

    assert draw_figure("mine", tmp_path, seed=3) == [tmp_path / "mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "None 3 None"
    with pytest.raises(SystemExit):
        main(["figure", "--help"])
    assert "mine a figure of my own" in " ".join(capsys.readouterr().out.split())
    register_figure("mine", about="again, as a module that is reloaded does")(mine)
    with pytest.raises(ValueError, match="the figure 'mine' is registered already"):
        register_figure("mine", about="another")(lambda out: [])


def test_the_list_needs_no_import_and_is_that_of_the_modules():
    assert list_figures().keys() == FIGURES.keys()
    assert set(FIGURES) == {
        *("toy", "methods", "cards", "correspondences", "effect", "interpolations", "teaser"),
        *("pose", "heads", "reliability", "localization", "curve"),
    }


def test_help_names_every_figure(capsys):
    with pytest.raises(SystemExit):
        main(["figure", "--help"])
    described = " ".join(capsys.readouterr().out.split())
    for name, about in list_figures().items():
        assert f"{name} {about}" in described


def test_an_unknown_figure_is_an_error_with_the_names(capsys):
    assert main(["figure", "tory"]) == 1
    said = capsys.readouterr().err
    assert "unknown figure 'tory'; did you mean 'toy'?" in said


def test_pairs_are_an_option_of_some_figures(tmp_path, capsys):
    assert main(["figure", "toy", "--pairs", "2", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "--pairs is an option of correspondences and interpolations; toy has none" in said
    assert main(["figure", "interpolations", "--pairs", "0", "--out", str(tmp_path)]) == 1
    assert "--pairs must be at least 1, got 0" in capsys.readouterr().err


# The other figures have tests of their own.
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("methods", "effect", "correspondences")
]


@pytest.mark.parametrize("name", ["toy", *SLOW])
@pytest.mark.slow
def test_each_figure_from_the_command_line(small, name, tmp_path, capsys):
    assert main(["figure", name, "--out", str(tmp_path / "out"), "--seed", "0"]) == 0
    png, pdf, text = (tmp_path / "out" / f"{name}{end}" for end in (".png", ".pdf", ".txt"))
    assert capsys.readouterr().out.split() == [str(png), str(pdf), str(text)]
    pixels = np.asarray(Image.open(png).convert("RGB"), dtype=float)
    assert min(pixels.shape[:2]) > 300
    assert pixels.var() > 100
    assert pdf.read_bytes().startswith(b"%PDF")


@pytest.mark.slow
def test_no_text_in_an_image_has_more_than_twelve_words(small, tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    seen = []
    plain = Figure.savefig

    def savefig(figure, *args, **settings):
        seen.extend(text.get_text() for text in figure.findobj(Text))
        return plain(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    for name in ("toy", "effect", "correspondences"):
        draw_figure(name, tmp_path / "figure.svg")
    assert any(seen)
    assert [text for text in seen if len(text.split()) > 12] == []


def test_the_extension_of_out_is_the_format(tmp_path, capsys, monkeypatch):
    svg = tmp_path / "new" / "points.svg"
    assert main(["figure", "toy", "--out", str(svg), "--style", "two-column-wide"]) == 0
    assert capsys.readouterr().out.split() == [str(svg), str(svg.with_suffix(".txt"))]
    assert svg.read_text().startswith("<?xml")
    assert [path.name for path in svg.parent.iterdir() if path.suffix != ".txt"] == ["points.svg"]
    assert main(["figure", "toy", "--out", str(tmp_path / "a.jpg")]) == 1
    assert "a.jpg is neither" in capsys.readouterr().err


def test_several_pictures_do_not_fit_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(FIGURES, "_entries", dict(FIGURES._entries))
    monkeypatch.setattr(by_name, "_about", dict(by_name._about))

    @register_figure("two", about="two pictures")
    def two(out, *, run=None, seed=0, data_root=None):
        figure = style.new_figure(1, 1)
        return [*style.save(figure, out / "a"), *style.save(figure, out / "b")]

    with pytest.raises(ValueError, match="has 2, which are in"):
        draw_figure("two", tmp_path / "one.svg")
    assert {path.name for path in draw_figure("two", tmp_path)} == {
        *("a.png", "a.pdf", "b.png", "b.pdf")
    }
