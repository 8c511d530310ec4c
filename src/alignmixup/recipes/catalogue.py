"""Every recipe by name, with the published figure it stands beside."""

from __future__ import annotations

import difflib
import fnmatch
from functools import cache

from alignmixup.recipes.classification import classification
from alignmixup.recipes.schema import Recipe
from alignmixup.report import paper

__all__ = ["find_recipe", "published_error", "recipe_names"]


@cache
def _recipes() -> dict[str, Recipe]:
    recipes = list(classification())
    by_name = {recipe.name: recipe for recipe in recipes}
    assert len(by_name) == len(recipes), "two recipes share a name"
    return by_name


def recipe_names(pattern: str = "*") -> list[str]:
    """Return the names that match; a pattern without a star may stand anywhere in the name."""
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    return fnmatch.filter(_recipes(), pattern)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; a name that does not exist is an error with the nearest."""
    recipes = _recipes()
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "see 'alignmixup recipes'"
        raise ValueError(f"unknown recipe {name!r}; {hint}")
    return recipes[name]


def published_error(name: str) -> float | None:
    """The paper's top-1 error for this row of the classification table, best test epoch."""
    for data in ("cifar10", "cifar100", "tiny"):
        for network in ("r18", "wrn16-8"):
            method = name.removeprefix(f"{data}-{network}-").removesuffix("-fast")
            if name.startswith(f"{data}-{network}-") and method in paper.METHODS:
                return paper.published(
                    table="cls", data=data, network=network, method=method, metric="top1_error"
                )
    return None
