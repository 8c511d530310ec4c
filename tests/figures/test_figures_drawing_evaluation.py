"""Figures of evaluations: what stands in the axes is what came in."""

import numpy as np
import pytest

from alignmixup.figures.drawing_evaluation import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    LocalizedPicture,
    ReliabilityPanel,
    localization_grid,
    reliability_diagrams,
)

PANEL = ReliabilityPanel(
    title="all",
    edges=(0.0, 0.25, 0.5, 0.75, 1.0),
    counts=(0, 3, 10, 7),
    confidence=(0.0, 0.4, 0.6, 0.9),
    accuracy=(0.0, 0.5, 0.3, 0.9),
    note="ECE 1.00 %",
)


def bars(axes):
    return [
        (round(p.get_x(), 6), round(p.get_y(), 6), round(p.get_height(), 6)) for p in axes.patches
    ]


def test_bars_are_accuracies_and_gaps_and_empty_bins_have_none():
    figure = reliability_diagrams([PANEL, PANEL], "two")
    top, other, bottom, _ = figure.axes
    assert bars(top) == bars(other)
    # Of each filled bin: its accuracy from the ground, then the gap to its confidence.
    assert bars(top) == [
        (0.25, 0, 0.5),
        (0.25, 0.5, -0.1),
        (0.5, 0, 0.3),
        (0.5, 0.3, 0.3),
        (0.75, 0, 0.9),
        (0.75, 0.9, 0),
    ]
    from matplotlib.colors import to_hex

    gaps = [to_hex(p.get_facecolor()) for p in top.patches[1::2]]
    assert gaps[:2] == [BLUE, ORANGE]  # not sure enough, too sure
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in top.lines[1:]]
    assert dots == [(0.4, 0.5), (0.6, 0.3), (0.9, 0.9)]
    assert [p.get_height() for p in bottom.patches] == [0, 3, 10, 7]
    assert [t.get_text() for t in bottom.texts] == ["0", "3", "10", "7"]
    assert "ECE 1.00 %" in top.get_title()


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
    figure = localization_grid([picture] * 5, "five", "note")
    axes = figure.axes[0]
    from matplotlib.colors import to_hex

    drawn = [
        (to_hex(p.get_edgecolor()), *p.get_xy(), p.get_width(), p.get_height())
        for p in axes.patches
    ]
    gap = 8 + 1
    assert drawn[:3] == [
        (GREEN, -0.5, -0.5, 8, 4),
        (GREEN, 1.5, 1.5, 1, 1),
        (RED, 0.5, 1.5, 4, 5),
    ]
    assert drawn[3:] == [(c, x + gap, y, w, h) for c, x, y, w, h in drawn[:3]]
    assert axes.get_title() == "ant\nIoU 0.38"
    shown = np.asarray(axes.images[0].get_array())
    assert (shown[:, :8] == 0.25).all()
    assert (shown[:, 8] == 1).all()
    assert np.ptp(shown[:, 9:, 2] - shown[:, 9:, 0]) == 0  # one colour for a map of zeros
    assert shown[0, 9, 2] > shown[0, 9, 0]
    assert len(figure.axes) == 8  # two rows of four, the last three empty


def test_nothing_found_is_said(picture):
    from dataclasses import replace

    figure = localization_grid([replace(picture, box=None, iou=0.0)], "one")
    assert figure.axes[0].get_title() == "ant\nnothing found"
    assert len(figure.axes[0].patches) == 4
