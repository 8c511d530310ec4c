"""What all figures share: palette, type, styles of papers, pictures with titles, saving.

matplotlib is imported when a figure is drawn, and draws without a screen. No text in an image has
more than twelve words: what a reader must know beside the title is the caption, a text file beside
the image.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alignmixup.files import make_folder, write_text, writing
from alignmixup.registry import suggestion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = object

__all__ = [
    "FORMATS",
    "PALETTE",
    "STYLES",
    "Figure",
    "Image",
    "Picture",
    "Style",
    "gallery",
    "new_figure",
    "picture_grid",
    "save",
    "show",
    "shrink",
    "use_style",
    "write_title",
]

Image = NDArray[np.floating[Any]]

# The palette of Okabe and Ito: its colors stay apart for color-blind readers.
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072b2", "#d55e00", "#cc79a7", "#000000"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, YELLOW)

FORMATS = ("png", "pdf", "svg")


@dataclass(frozen=True)
class Style:
    """How figures look: their width in inches (None: each its own) and the type size in points.

    In a paper the title is part of the caption, so a style with a width draws none.
    """

    about: str
    width: float | None = None
    font_size: float = 10.0
    dpi: int = 150


STYLES = {
    "screen": Style("each figure at its own width, with a title"),
    "one-column": Style("the text width of a one-column paper, 5.5 in", 5.5, 8.0, 300),
    "two-column": Style("one column of a two-column paper, 3.25 in", 3.25, 7.0, 300),
    "two-column-wide": Style("both columns of a two-column paper, 6.875 in", 6.875, 8.0, 300),
}


_style: ContextVar[Style] = ContextVar("style", default=STYLES["screen"])
_formats: ContextVar[tuple[str, ...]] = ContextVar("formats", default=("png", "pdf"))


@contextmanager
def use_style(name: str = "screen", formats: tuple[str, ...] = ("png", "pdf")) -> Iterator[Style]:
    """Draw and save figures in one of ``STYLES`` and some of ``FORMATS`` within the block."""
    if name not in STYLES:
        raise ValueError(f"unknown style {name!r}{suggestion(name, list(STYLES))}")
    if unknown := [each for each in formats if each not in FORMATS]:
        raise ValueError(f"unknown format {unknown[0]!r}; choose from {', '.join(FORMATS)}")
    from matplotlib import rc_context

    style = STYLES[name]
    tokens = _style.set(style), _formats.set(formats)
    try:
        with rc_context(_rc(style.font_size)):
            yield style
    finally:
        _style.reset(tokens[0])
        _formats.reset(tokens[1])


def _rc(font_size: float) -> dict[str, Any]:
    """The same type and lines in every figure; sizes by name are shares of the type size."""
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
        "mathtext.fontset": "dejavusans",
        "font.size": font_size,
        "figure.titlesize": "large",
        "axes.titlesize": "medium",
        "axes.labelsize": "medium",
        "legend.fontsize": "small",
        "xtick.labelsize": "small",
        "ytick.labelsize": "small",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "pdf.fonttype": 42,  # TrueType: publishers refuse the bitmaps of type 3
    }


@dataclass(frozen=True)
class Picture:
    """One image of a gallery, [h, w, 3] in [0, 1], with its title and what stands below it."""

    title: str
    image: Image
    caption: str


LEAST_WIDTH = 1.05  # inches of a picture of a gallery, with its label below it


def gallery(pictures: Sequence[Picture], title: str, columns: int = 5) -> Figure:
    """Pictures in rows, each with its title above and its caption below."""
    figure, places = picture_grid(len(pictures), columns, LEAST_WIDTH, (2.1, 2.75), 0.5)
    for axes, picture in zip(places, pictures, strict=False):
        show(axes, picture.image, picture.title, frame=True)
        axes.text(
            0.5,
            -0.04,
            picture.caption.replace(", ", "\n"),
            fontsize="small",
            ha="center",
            va="top",
            transform=axes.transAxes,
        )
    return write_title(figure, title)


def show(axes: Any, image: Image, title: str = "", *, frame: bool = False) -> None:
    """Draw an image without axes; a ``frame`` shows where a white one ends."""
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest")
    axes.set_axis_off()
    if frame:
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="0.75", linewidth=0.6)
    if title:
        axes.set_title(title)


def picture_grid(
    count: int, columns: int, least_width: float, size: tuple[float, float], margin: float
) -> tuple[Figure, list[Any]]:
    """An empty figure with ``count`` places of this size, in rows, and a margin for its title.

    There are fewer columns where places of ``least_width`` inches would not fit the style.
    """
    width = _style.get().width
    if width is not None:
        columns = max(1, min(columns, int(width / least_width)))
    num_rows = -(-count // columns)
    figure = new_figure(size[0] * columns, size[1] * num_rows + margin)
    places = list(figure.subplots(num_rows, columns, squeeze=False).flat)
    for axes in places:
        axes.set_axis_off()
    return figure, places


def shrink(width: float) -> float:
    """The factor by which the style scales a figure of that many inches: 1 on a screen."""
    return (_style.get().width or width) / width


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, laid out so that nothing overlaps.

    A style with a width of its own scales it to that width.
    """
    from matplotlib import figure

    scale = shrink(width)
    return figure.Figure(figsize=(width * scale, height * scale), layout="constrained")


def write_title(figure: Figure, title: str) -> Figure:
    """Write the title above a figure, unless the style leaves it to the caption; return both."""
    if _style.get().width is None:
        figure.suptitle(title)
    return figure


def save(figure: Figure, path: Path, caption: str = "") -> list[Path]:
    """Write the figure to ``path`` with each extension, and its caption as text; return the paths.

    The caption is what a reader must know: what is shown, what was chosen, what it was drawn from.
    """
    style = _style.get()
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns of dates in our own font
    make_folder(path.parent)
    written = []
    # A paper's figure keeps exactly its width.
    margins = "tight" if style.width is None else None
    for extension in _formats.get():
        file = path.with_name(f"{path.name}.{extension}")
        with writing(file):
            figure.savefig(file, dpi=style.dpi, bbox_inches=margins)
        written.append(file)
    if caption:
        file = path.with_name(f"{path.name}.txt")
        write_text(file, "\n".join(textwrap.wrap(caption, 100)) + "\n")
        written.append(file)
    return written
