"""Every recipe by name, with the published figure it stands beside."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator
from functools import cache

from alignmixup.recipes.ablation import ablation
from alignmixup.recipes.classification import classification
from alignmixup.recipes.imagenet import imagenet, imagenet_100
from alignmixup.recipes.levit import levit
from alignmixup.recipes.localization import localisation
from alignmixup.recipes.schema import Recipe, Row
from alignmixup.recipes.short import short_cifar100
from alignmixup.report.paper import Published

__all__ = ["find_recipe", "published_cell", "published_error", "recipe_names"]

# Each gives its recipes and, beside each, the cell of the paper's tables that it is a row of.
FAMILIES: tuple[Callable[[], Iterator[Row]], ...] = (
    classification,
    short_cifar100,
    ablation,
    imagenet,
    imagenet_100,
    levit,
    localisation,
)


@cache
def _rows() -> dict[str, Row]:
    rows = [row for family in FAMILIES for row in family()]
    by_name = {row.recipe.name: row for row in rows}
    assert len(by_name) == len(rows), "two recipes share a name"
    return by_name


def recipe_names(pattern: str = "*") -> list[str]:
    """Return the names that match; a pattern without a star may stand anywhere in the name."""
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    return fnmatch.filter(_rows(), pattern)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; a name that does not exist is an error with the nearest."""
    rows = _rows()
    if name not in rows:
        close = difflib.get_close_matches(name, rows, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "see 'alignmixup recipes'"
        raise ValueError(f"unknown recipe {name!r}; {hint}")
    return rows[name].recipe


def published_cell(name: str) -> Published | None:
    """The cell of the paper's tables that this recipe is a row of; None for any other name."""
    row = _rows().get(name)
    return None if row is None else row.published


def published_error(name: str) -> float | None:
    """The paper's top-1 error for this recipe, on the paper's own schedule, best test epoch."""
    cell = published_cell(name)
    return None if cell is None else cell.top1_error
