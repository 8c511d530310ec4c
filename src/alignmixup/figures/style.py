"""What all figures share: the palette, pictures with titles, a page to draw on, saving.

matplotlib is imported when a figure is drawn, and draws without a screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alignmixup.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "Image", "Picture", "gallery", "new_figure", "save", "show", "write_titles"]

Image = NDArray[np.floating[Any]]

# The palette of Okabe and Ito: its colors stay apart for color-blind readers.
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072b2", "#d55e00", "#cc79a7", "#000000"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, YELLOW)


@dataclass(frozen=True)
class Picture:
    """One image of a gallery, [h, w, 3] in [0, 1], with its title and what stands below it."""

    title: str
    image: Image
    caption: str


def gallery(pictures: Sequence[Picture], title: str, note: str = "", columns: int = 5) -> Figure:
    """Pictures in rows, each with its title above and its caption below."""
    num_rows = -(-len(pictures) // columns)
    figure = new_figure(2.1 * columns, 2.75 * num_rows + 0.8)
    grid = figure.subplots(num_rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, picture in zip(grid.flat, pictures, strict=False):
        show(axes, picture.image, picture.title, size=10)
        axes.text(
            0.5, -0.04, picture.caption, fontsize=8, ha="center", va="top", transform=axes.transAxes
        )
    return write_titles(figure, title, note, size=12)


def show(axes: Any, image: Image, title: str = "", size: int = 8) -> None:
    """Draw an image without axes."""
    axes.imshow(np.clip(image, 0, 1), interpolation="nearest")
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=size)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, laid out so that nothing overlaps."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_titles(figure: Figure, title: str, note: str = "", size: int = 11) -> Figure:
    """Write the title above and the note below a figure; return the figure."""
    figure.suptitle(title, fontsize=size)
    if note:
        figure.supxlabel(note, fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF beside each other and return both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    for file in written:
        with writing(file):
            figure.savefig(file, dpi=150, bbox_inches="tight")
    return written
