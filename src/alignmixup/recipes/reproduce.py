"""From a cell of the paper to the commands that measure it again.

    alignmixup recipes --table adv                    every cell of that table with its commands

A cell has a recipe to train and, unless training itself gives the figure, a command for the run.
``MISSING`` names the cells that have none, with the reason; a test holds it to the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from alignmixup.report import ablation, paper
from alignmixup.report.paper import Published

__all__ = ["MISSING", "Steps", "steps_of"]


@dataclass(frozen=True)
class Steps:
    """The recipe of a cell, and the words of the command that scores its run, if it needs one."""

    recipe: str
    command: tuple[str, ...] = ()


# By table, network and method; every other printed cell has a recipe.
MISSING: Mapping[tuple[str, str, str], str] = {}


def steps_of(cell: Published) -> Steps:
    """Return how a cell of one of the paper's tables is measured (but see ``MISSING``)."""
    return _TABLES[cell.table](cell)


def _trained(cell: Published, suffix: str = "") -> str:
    # In recipes the network of the localisation table has its short name.
    network = {"vgg-gap": "vgg"}.get(cell.network, cell.network)
    return f"{cell.data}-{network}-{cell.method}{suffix}"


def _folder(recipe: str) -> str:
    return f"runs/{recipe}-seed0"


def _evaluated(cell: Published, *words: str) -> Steps:
    recipe = _trained(cell)
    return Steps(recipe, ("evaluate", _folder(recipe), "--tasks", *words))


def _imagenet(cell: Published) -> Steps:
    recipe = _trained(cell)
    if cell.metric == "top1_error":
        return Steps(recipe)
    return Steps(recipe, ("bench", recipe))  # of the recipe: no run is needed


def _ablation(cell: Published) -> Steps:
    rows = [name for name, row in ablation.ROWS.items() if row.cell == cell]
    # The first rows of the table are methods, which have no set of layers.
    return Steps(f"{ablation.FAMILY}-{cell.data}-{rows[0] if rows else cell.method}")


def _detection(cell: Published) -> Steps:
    recipe = f"imagenet-r50-{cell.method}"
    data = {"voc07": "voc", "coco": "coco"}[cell.data]
    return Steps(recipe, ("detect", _folder(recipe), "--data", data))


_TABLES: Mapping[str, Callable[[Published], Steps]] = {
    "cls": lambda cell: Steps(_trained(cell)),
    "cls-imgnet": _imagenet,
    "cls-300": lambda cell: Steps(_trained(cell, "-300")),
    "adv": lambda cell: _evaluated(cell, cell.metric.removesuffix("_error")),
    "ood": lambda cell: _evaluated(cell, "ood", "--ood", cell.source),
    "ood_extra": lambda cell: _evaluated(cell, "ood", "--ood", cell.source),
    "wsol": lambda cell: _evaluated(cell, "localization"),
    "ablation": _ablation,
    "imgnet": lambda cell: Steps(_trained(cell, "-100")),
    "levit": lambda cell: Steps(_trained(cell)),
    "supp-calibration": lambda cell: _evaluated(cell, "calibration"),
    "iterations": _ablation,
    "detection": _detection,
    "logs": lambda cell: Steps(_trained(cell)),
}
assert _TABLES.keys() == paper.TABLES.keys()
