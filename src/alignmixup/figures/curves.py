"""Test accuracy by epoch, which the demo draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from alignmixup.figures.style import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Test accuracy by epoch, one line a method."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    axes.set_prop_cycle(color=PALETTE)
    for name, points in curves.items():
        epochs, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(epochs, values, marker="o", markersize=3, label=name)
    axes.set(xlabel="epoch", ylabel="test top-1 (%)", title=title)
    axes.grid()
    axes.legend()
    return figure
