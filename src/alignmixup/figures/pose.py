"""Whether pose follows the image whose positions are kept, and appearance the other, drawn.

``pose_measures`` says what is measured. Beside the figure its numbers are written as JSON lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from alignmixup import datasets
from alignmixup.experiments.built_in import DecodedSource, decoded_source, write_lines
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.pose_measures import PosePoint, pose_points, pose_results
from alignmixup.figures.pose_plans import PLANS, assignment, carried
from alignmixup.figures.sources import different_pairs, floats, shown
from alignmixup.figures.style import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILLION,
    Figure,
    Image,
    new_figure,
    save,
    show,
    shrink,
    write_title,
)

NUM_EXAMPLES, NUM_PAIRS = 6, 250
COLOURS = dict(zip(PLANS, (PURPLE, BLUE, GREEN, VERMILLION, "0.5"), strict=True))


@register_figure("pose", about="whether pose follows the image whose positions are kept")
def pose(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Measure pose and appearance of decoded mixes of shapes, draw them, write them as JSON lines.

    Of a run on shapes, where both are known; with any other data it is an error.
    """
    source = decoded_source(out, run, seed, data_root)
    if source.recipe.data.name != "shapes":
        raise ValueError(
            "pose and appearance are known for the built-in shapes alone, and this run's data are "
            f"{source.recipe.data.name}: train one with --dataset shapes"
        )
    images = source.images
    truth = datasets.draw_shapes(images.split, len(images), images.images.shape[-1])
    points = pose_points(
        source.painter,
        truth,
        num_pairs=NUM_PAIRS,
        seed=seed,
        eps=source.eps,
        num_iters=source.num_iters,
    )
    settings = {"layer": source.painter.layer, "num_pairs": NUM_PAIRS, "pair_seed": seed}
    results = [r.stamped(**source.where()) for r in pose_results(points, settings)]
    lines = write_lines(results, out / "pose.jsonl")
    figure = draw_pose(
        points, _examples(source, truth, seed), "Pose and appearance of decoded mixes"
    )
    caption = (
        f"Pose and appearance of decoded mixes, means over {NUM_PAIRS} pairs: {source.what}. "
        "Diamonds, and the decoded examples on the right: nothing of the kept image's features is "
        "left (share 0), those of the other are carried by each plan."
    )
    return [*save(figure, out / "pose", caption), lines]


@torch.no_grad()
def _examples(
    source: DecodedSource, truth: datasets.ShapesDrawing, seed: int
) -> dict[str, list[Image]]:
    """Kept and other images, both decoded, and the other's features carried over by each plan."""
    pairs = different_pairs(truth.image_set, NUM_EXAMPLES, seed)
    chosen = [*(i for i, _ in pairs), *(j for _, j in pairs)]
    painter, n = source.painter, len(pairs)
    device = next(painter.net.parameters()).device
    x = floats(truth.image_set, chosen).to(device)
    masks = truth.truth.masks[chosen].to(device)
    features, perm = painter.features(x), torch.arange(2 * n, device=device).roll(n)
    columns = {"kept": x, "other": x[perm], "kept,\ndecoded": painter.paint(features)}
    names = {"unaligned": "other,\ndecoded"}
    for plan in PLANS:
        R = assignment(
            *(features, perm, plan, masks), eps=source.eps, num_iters=source.num_iters, seed=seed
        )
        columns[names.get(plan, plan)] = painter.paint(carried(features, perm, R))
    order = ["kept", "other", "kept,\ndecoded", "other,\ndecoded", *PLANS]
    return {
        name: [shown(image) for image in columns[name][:n]] for name in order if name in columns
    }


def draw_pose(
    points: Sequence[PosePoint], examples: Mapping[str, Sequence[Image]], title: str
) -> Figure:
    """Left, a line a plan through (appearance, pose); right, decoded examples, a column a kind."""
    names, width = list(examples), 0.95 * len(examples)
    is_small = shrink(5.0 + width) < 0.6  # of a paper: the plot above the examples
    if is_small:
        figure = new_figure(width, 10.0)
        halves: Any = figure.subfigures(2, 1, height_ratios=(4.5, 5.5))
    else:
        figure = new_figure(5.0 + width, 5.2)
        halves = figure.subfigures(1, 2, width_ratios=(5.0, width))
    axes = halves[0].subplots()
    dot = 2.5 if is_small else 4.0
    for plan, color in COLOURS.items():
        way = sorted((p for p in points if p.plan == plan), key=lambda p: -p.kept_share)
        appearance, poses = [p.appearance for p in way], [p.pose for p in way]
        axes.plot(appearance, poses, marker="o", markersize=dot, color=color, label=plan)
        axes.plot(appearance[-1:], poses[-1:], marker="D", markersize=1.7 * dot, color=color)
    axes.axhline(0, color="0.7", linewidth=0.8, linestyle="--")
    axes.set_xlabel("appearance: 0 the kept image's, 1 the other's")
    axes.set_ylabel("pose: 1 the kept image's, 0 a stranger's")
    axes.set_title("diamonds: nothing of the kept features is left")
    axes.grid()
    axes.legend(loc="upper right")
    grid = halves[1].subplots(len(examples[names[0]]), len(names), squeeze=False)
    for column, name in enumerate(names):
        for row, image in enumerate(examples[name]):
            show(grid[row, column], image)
        heading = grid[0, column].set_title(name, fontsize="small" if is_small else "medium")
        heading.set_rotation(90 if is_small else 0)
    return write_title(figure, title)
