"""From a cell of the paper to the commands that measure it.

    alignmixup recipes --table adv                    every cell of that table with its commands

A cell has a recipe to train and, unless training itself gives the figure, a command for the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignmixup.contracts import RecipeKey
from alignmixup.report import paper
from alignmixup.report.paper import Published


@dataclass(frozen=True)
class Steps:
    """The recipe of a cell, and the words of the command that scores its run, if it needs one."""

    recipe: str
    command: tuple[str, ...] = ()


# The task that measures a metric of the paper; others need training or a command of their own.
_TASKS = {
    "fgsm_error": "fgsm",
    "pgd_error": "pgd",
    **dict.fromkeys(("ece", "oe"), "calibration"),
    **dict.fromkeys(("top1_loc", "maxboxacc_v2"), "localization"),
    **dict.fromkeys(("det_acc_half", "auroc", "aupr_id", "aupr_ood"), "ood"),
}


def steps_of(cell: Published) -> Steps:
    """Return how a cell of one of the paper's tables is measured."""
    if cell.table == "detection":  # a detector on the backbone of an ImageNet run
        name = RecipeKey("imagenet", "r50", cell.method).name
        data = {"voc07": "voc", "coco": "coco"}[cell.data]
        return Steps(name, ("detect", f"runs/{name}-seed0", "--data", data))
    name = paper.key_of(cell).name
    if cell.metric in ("params", "ms_per_batch"):
        return Steps(name, ("bench", name))  # of the recipe: no run is needed
    if cell.metric in ("top1_error", "top1", "top1_median10"):
        return Steps(name)
    source = ("--ood", cell.source) if cell.source else ()
    return Steps(name, ("evaluate", f"runs/{name}-seed0", "--tasks", _TASKS[cell.metric], *source))


def table_of_recipes() -> dict[str, str]:
    """Return the first table of the paper that each recipe is needed for."""
    tables: dict[str, str] = {}
    for cell in paper.FIGURES:
        if cell.value is not None:
            tables.setdefault(steps_of(cell).recipe, cell.table)
    return tables
