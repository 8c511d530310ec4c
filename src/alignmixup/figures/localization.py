"""Class activation maps with the predicted and the true boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from alignmixup.contracts import ImageSet
from alignmixup.evaluation.tasks.localization import LocalizationSettings, localize
from alignmixup.experiments.built_in import localizer
from alignmixup.experiments.load import load_run
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import Source, floats, run_source, shown
from alignmixup.figures.style import ORANGE, SKY, Figure, Image, picture_grid, save, write_title
from alignmixup.models.zoo import default_tap

NUM_PICTURES, COLUMNS = 8, 4
LEAST_WIDTH = 1.6  # inches of an image beside its map
PREDICTED, TRUE = (ORANGE, "-"), (SKY, "--")  # by color and by line
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class LocalizedPicture:
    """An image [h, w, 3] in [0, 1], the map over it [h, w] in [0, 1], and both kinds of boxes.

    Boxes are (x0, y0, x1, y1), ends exclusive; ``box`` is None where nothing was found.
    """

    image: Image
    heat: Image
    box: Box | None
    true_boxes: Sequence[Box]
    iou: float
    caption: str


@register_figure("localization", about="boxes found by class activation maps, and the true ones")
def localization(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw images chosen by ``seed`` with their maps, the boxes found and the true ones."""
    source = classifier_source(out, run, seed, data_root)
    settings = LocalizationSettings()
    pictures = localized_pictures(source.net, source.images, seed=seed, settings=settings)
    caption = (
        f"Localization by class activation maps: {source.what}. Solid, orange: the box of the "
        f"largest part of the map above {settings.cam_threshold:g} of its range; dashed, blue: "
        "true boxes. The map is that of the predicted class. Images drawn at random."
    )
    figure = draw_localization(pictures, "Boxes found (solid) and true (dashed)")
    return save(figure, out / "localization", caption)


def classifier_source(out: Path, run: Path | None, seed: int, data_root: Path | None) -> Source:
    """The run's network and test images, or a small network trained on shapes."""
    if run is not None:
        return run_source(run, data_root)
    folder, images = localizer(out, seed)
    size = images.images.shape[-1]
    opened = load_run(folder, num_classes=images.num_classes, image_size=size, device="cpu")
    what = (
        f"a narrow WRN16-8 after {opened.epoch} epoch{'' if opened.epoch == 1 else 's'} on shapes"
    )
    return Source(opened.model, default_tap(opened.recipe.net, opened.model), images, what)


def localized_pictures(
    net: nn.Module,
    images: ImageSet,
    *,
    num_pictures: int = NUM_PICTURES,
    seed: int = 0,
    settings: LocalizationSettings | None = None,
) -> list[LocalizedPicture]:
    """Localize in images drawn at random among those that have a box."""
    boxes = images.boxes or ()
    boxed = [i for i, of_image in enumerate(boxes) if len(of_image)]
    if not boxed:
        raise ValueError(f"{images.name} has no boxes: choose images that have boxes")
    order = torch.randperm(len(boxed), generator=torch.Generator().manual_seed(seed))
    chosen = [boxed[i] for i in order[:num_pictures].tolist()]
    x, truth = floats(images, chosen), [boxes[i] for i in chosen]
    settings = settings or LocalizationSettings()
    pictures = []
    for image, place in zip(
        x, localize(net, x, images.labels[chosen], truth, settings=settings), strict=True
    ):
        said, true = images.class_names[place.predicted], images.class_names[place.label]
        pictures.append(
            LocalizedPicture(
                image=shown(image),
                heat=place.heat / 255,
                box=place.box,
                true_boxes=place.true_boxes,
                iou=place.iou,
                caption=said if said == true else f"{said} (is: {true})",
            )
        )
    return pictures


def draw_localization(pictures: Sequence[LocalizedPicture], title: str) -> Figure:
    """Two pictures an image: as it is, and under its map; the boxes on both, the IoU above."""
    count = len(pictures)
    figure, places = picture_grid(count, min(COLUMNS, count), LEAST_WIDTH, (2.9, 1.95), 0.6)
    for axes, picture in zip(places, pictures, strict=False):
        _draw_localized(axes, picture)
    return write_title(figure, title)


def _draw_localized(axes: Any, picture: LocalizedPicture) -> None:
    from matplotlib import colormaps

    height, width = picture.image.shape[:2]
    gap = max(1, width // 16)
    canvas = np.ones((height, 2 * width + gap, 3))
    colors = colormaps["cividis"](np.clip(picture.heat, 0, 1))[..., :3]
    canvas[:, :width] = picture.image
    canvas[:, width + gap :] = 0.5 * picture.image + 0.5 * colors
    axes.imshow(np.clip(canvas, 0, 1), interpolation="nearest")
    for shift in (0, width + gap):
        for box in picture.true_boxes:
            _draw_box(axes, box, *TRUE, shift)
        if picture.box is not None:
            _draw_box(axes, picture.box, *PREDICTED, shift)
    found = f"IoU {picture.iou:.2f}" if picture.box is not None else "nothing found"
    axes.set_title(f"{picture.caption}\n{found}")


def _draw_box(axes: Any, box: Box, color: str, line: str, shift: float) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    x0, y0, x1, y1 = box
    # A pixel is drawn around its number: the first begins half a pixel before.
    corner = (x0 + shift - 0.5, y0 - 0.5)
    frame = Rectangle(corner, x1 - x0, y1 - y0, fill=False, edgecolor=color, lw=1.4, ls=line)
    frame.set_path_effects([withStroke(linewidth=2.4, foreground="black")])
    axes.add_patch(frame)
