"""Reliability diagrams: accuracy by confidence with the count of each bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alignmixup.contracts import Result
from alignmixup.evaluation.tasks.calibration import Reliability
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.experiments.scoring import evaluate
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.localization import classifier_source
from alignmixup.figures.style import BLUE, VERMILLION, Figure, new_figure, save, shrink, write_title
from alignmixup.report.reading import read_results


@dataclass(frozen=True)
class ReliabilityPanel:
    """One diagram with its title and, below that, the figures that sum it up."""

    title: str
    bins: Reliability
    note: str = ""


@register_figure(
    "reliability", about="accuracy by confidence, before and after temperature scaling"
)
def reliability(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw the reliability diagram of a run: the figures it recorded, or else measured now."""
    results: Sequence[Result] = []
    if run is not None and (run / "results.jsonl").exists():
        results = _recorded(read_results([run]))
        what = f"run {read_recipe(run).name}"
        if results and results[0].epoch is not None:
            what += f", {results[0].epoch} epoch{'' if results[0].epoch == 1 else 's'}"
    if not results:
        source = classifier_source(out, run, seed, data_root)
        what, tasks = source.what, ["calibration", "temperature"]
        results = evaluate(source.net, source.images, tasks=tasks, seed=seed).results
    caption = (
        f"Reliability of {what}: the accuracy of each bin of confidence; the hatched part is what "
        "confidence is above (orange) or below (blue) it, the dot the mean confidence and "
        "accuracy of the bin."
    )
    figure = draw_reliability(reliability_panels(results), "Reliability")
    return save(figure, out / "reliability", caption)


def _recorded(results: Sequence[Result]) -> list[Result]:
    """The diagrams of the last epoch that has any, on the run's own images if it has those."""
    found = [r for r in results if _has_diagram(r)]
    last = max((r.epoch or 0 for r in found), default=0)
    found = [r for r in found if (r.epoch or 0) == last]
    return [r for r in found if "images" not in r.settings] or found


def reliability_panels(results: Sequence[Result]) -> list[ReliabilityPanel]:
    """The newest diagram among the results, and that after temperature scaling if there is one."""
    newest = {r.task: r for r in sorted(results, key=lambda r: r.date) if _has_diagram(r)}
    if not newest:
        raise ValueError("no reliability diagram among the results: evaluate calibration first")
    return [_panel(newest[task]) for task in ("calibration", "temperature") if task in newest]


def _has_diagram(result: Result) -> bool:
    return result.metric == "ece" and "reliability" in result.settings


def _panel(result: Result) -> ReliabilityPanel:
    recorded: Any = result.settings["reliability"]
    bins = Reliability(**recorded)
    count = sum(bins.counts)
    # Images that somebody passed are named: they need not be the run's own.
    title = str(result.settings.get("images", f"{count:,} images"))
    if result.task == "temperature":
        others = f"{count:,} of {title}" if "images" in result.settings else title
        title = f"temperature {result.settings['temperature']:.2f}\n{others}"
    else:
        title = f"as trained\n{title}"
    note = f"ECE {result.value:.2f} %, OE {100 * bins.oe:.2f} %"
    return ReliabilityPanel(title, bins, note)


def draw_reliability(panels: Sequence[ReliabilityPanel], title: str) -> Figure:
    """One column a panel: accuracy by confidence above, the counts of the bins below.

    The bar of a bin is its accuracy; what lies between it and the bin's mean confidence is hatched,
    in orange where the network is too sure of itself, in blue where it is not sure enough.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    width = max(4.6, 4.4 * len(panels))
    is_small = shrink(width) < 0.6
    figure = new_figure(width, 9.5 if is_small else 6.2)
    # Each with counts of its own: what is held out for a temperature is missing from its panel.
    grid = figure.subplots(2, len(panels), squeeze=False, sharex=True, height_ratios=(2.4, 1))
    for column, panel in enumerate(panels):
        _draw_bins(grid[0, column], panel.bins, dot=1.6 if is_small else 3.2)
        grid[0, column].set_title(f"{panel.title}\n{panel.note}".strip())
        _draw_counts(grid[1, column], panel.bins, with_numbers=not is_small)
    grid[0, 0].set_ylabel("accuracy")
    grid[1, 0].set_ylabel("images")
    for axes in grid.flat:
        axes.set_xticks([0, 0.5, 1] if is_small else np.linspace(0, 1, 6))
    dot = Line2D([], [], color="black", marker="o", markersize=3.2, linestyle="none")
    dot.set_label("mean confidence and accuracy of a bin")
    bars = [
        Patch(facecolor="0.8", edgecolor="0.35", label="accuracy"),
        Patch(facecolor=VERMILLION, alpha=0.45, hatch="///", label="too confident by"),
        Patch(facecolor=BLUE, alpha=0.45, hatch="///", label="not confident enough by"),
    ]
    figure.legend(handles=[*bars, dot], loc="outside lower center", ncols=2)
    return write_title(figure, title)


def _draw_bins(axes: Any, bins: Reliability, dot: float) -> None:
    axes.plot([0, 1], [0, 1], color="0.4", linewidth=0.9, linestyle="--")
    width = bins.edges[1] - bins.edges[0]
    for left, count, confidence, accuracy in zip(
        bins.edges[:-1], bins.counts, bins.confidence, bins.accuracy, strict=True
    ):
        if not count:
            continue
        axes.bar(left, accuracy, width, align="edge", color="0.8", edgecolor="0.35", linewidth=0.7)
        color = VERMILLION if confidence > accuracy else BLUE
        gap = {"bottom": accuracy, "align": "edge", "color": color, "edgecolor": color}
        axes.bar(left, confidence - accuracy, width, alpha=0.45, hatch="///", linewidth=0.0, **gap)
        # Where in the bin its confidences lie, on average.
        axes.plot(confidence, accuracy, marker="o", markersize=dot, color="black")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.grid()


def _draw_counts(axes: Any, bins: Reliability, *, with_numbers: bool) -> None:
    edges, counts = np.asarray(bins.edges), np.asarray(bins.counts)
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color="0.8", edgecolor="0.35")
    top = max(1, int(counts.max()))
    middles = (edges[:-1] + edges[1:]) / 2
    for middle, count in zip(middles, counts, strict=True) if with_numbers else ():
        axes.text(
            middle, count + 0.03 * top, str(count), fontsize="xx-small", ha="center", rotation=90
        )
    axes.set(xlim=(0, 1), ylim=(0, 1.35 * top), xlabel="confidence")
