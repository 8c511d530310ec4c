"""The learning curve of a run, with the authors' log behind it where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alignmixup.experiments.run_folder import read_recipe
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.style import BLACK, BLUE, Figure, new_figure, save, write_title
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.report.authors_logs import LOGS
from alignmixup.report.folding import SHORT
from alignmixup.training.ledger import LEDGER, read_ledger

Points = Sequence[tuple[int, float]]


@register_figure("curve", about="test accuracy of a run by epoch, over the authors' log")
def curve(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw the test accuracies in the ledger of a run."""
    if run is None:
        raise ValueError("the figure 'curve' is drawn from a run; give one with --run")
    recipe, ours = read_recipe(run), scored_epochs(run)
    if not ours:
        raise ValueError(f"no epoch of the run in {run} has been evaluated yet")
    is_theirs = isinstance(recipe.mixer, AlignMixup) and recipe.train.schedule == "step"
    log = LOGS.get((recipe.key.data, recipe.key.network), ()) if is_theirs else ()
    caption = f"Test accuracy by epoch of {recipe.name}, seed {recipe.train.seed}."
    if log:
        caption += " Thin: the log released by the authors."
    return save(draw_curve(ours, log, recipe.name), out / "curve", caption)


def scored_epochs(run: Path) -> Points:
    """The epochs of a run that were evaluated, with their top-1 in per cent."""
    epochs = [event for event in read_ledger(run / LEDGER) if event["event"] == "epoch"]
    return [(e["epoch"], e["test"]["top1"]) for e in epochs if "test" in e]  # type: ignore[index,misc]


def draw_curve(ours: Points, log: Points, title: str) -> Figure:
    """Draw our points as a line over those of the log."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7, 3.6)
    axes = figure.subplots()
    if log:
        line = axes.plot(*zip(*log, strict=True), "o-", color=BLACK, label="authors' log")[0]
        line.set(linewidth=0.8, markersize=3, alpha=0.6)
    marker = "o" if len(ours) < SHORT else ""  # of one epoch a line alone shows nothing
    line = axes.plot(*zip(*ours, strict=True), color=BLUE, linewidth=1.2, label="ours")[0]
    line.set(marker=marker, markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    values = [top1 for epoch, top1 in [*ours, *log] if epoch > 10] or [0.0]
    axes.set_ylim(bottom=max(0.0, min(values) - 3))
    axes.set_xlabel("epoch")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.legend()
    return write_title(figure, title)
