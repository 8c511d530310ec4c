"""The registry: figures add themselves, and the command line draws and lists them."""

import numpy as np
import pytest
from PIL import Image

from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.figures import effect, methods, registry, sources
from alignmixup.figures.registry import draw_figure, list_figures, register_figure
from alignmixup.registry import FIGURES


@pytest.fixture
def small(monkeypatch):
    """Less of everything that takes time."""
    images = shapes("test", 60)
    monkeypatch.setattr(sources.datasets, "shapes", lambda split: images)
    monkeypatch.setattr(effect, "NUM_IMAGES", 2)
    monkeypatch.setattr(effect, "MOST_POSITIONS", 64)
    monkeypatch.setattr(methods, "ADAIN_STEPS", 4)


def test_a_figure_from_outside_is_listed_and_drawn(tmp_path, monkeypatch, capsys):
    assert "toy" in FIGURES  # all of ours are there
    monkeypatch.setattr(FIGURES, "_entries", dict(FIGURES._entries))
    monkeypatch.setattr(registry, "_about", dict(registry._about))

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


# The other figures have tests of their own.
@pytest.mark.parametrize("name", ["toy", "methods", "correspondences", "effect"])
def test_each_figure_from_the_command_line(small, name, tmp_path, capsys):
    assert main(["figure", name, "--out", str(tmp_path / "out"), "--seed", "0"]) == 0
    png, pdf = (tmp_path / "out" / f"{name}{end}" for end in (".png", ".pdf"))
    assert capsys.readouterr().out.split() == [str(png), str(pdf)]
    pixels = np.asarray(Image.open(png).convert("RGB"), dtype=float)
    assert min(pixels.shape[:2]) > 300
    assert pixels.var() > 100
    assert pdf.read_bytes().startswith(b"%PDF")
