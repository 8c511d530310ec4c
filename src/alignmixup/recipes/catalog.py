"""Every recipe by name: those of the functions in the registry ``RECIPES``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from alignmixup.checking import check_call
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import RECIPES, suggestion


def recipe_names(pattern: str = "*") -> list[str]:
    """Return the names that match; a pattern without a star may stand anywhere in the name."""
    if not any(sign in pattern for sign in "*?["):
        pattern = f"*{pattern}*"
    return fnmatch.filter(_recipes(), pattern)


def matching_recipes(pattern: str) -> list[str]:
    """Return the names that match; raise a ``ValueError`` with the nearest where none does."""
    names = recipe_names(pattern)
    if not names:
        hint = suggestion(pattern, recipe_names()) or "; 'alignmixup recipes --all' lists all"
        raise ValueError(f"no recipe matches {pattern!r}{hint}")
    return names


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; an unknown name raises a ``ValueError`` with the nearest."""
    recipes = _recipes()
    if name not in recipes:
        hint = suggestion(name, list(recipes)) or "; 'alignmixup recipes --all' lists all"
        if name.endswith(".py"):
            hint = f"; name its function as well: {name}:FUNCTION"
        raise ValueError(f"unknown recipe {name!r}{hint}")
    return recipes[name]


def _recipes() -> Mapping[str, Recipe]:
    return _made_by(tuple(RECIPES.values()))


@cache
def _made_by(functions: tuple[Callable[[], Recipe | Iterable[Recipe]], ...]) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for function in functions:
        check_call(f"the recipe {function.__qualname__}", function)
        made = function()
        for recipe in [made] if isinstance(made, Recipe) else made:
            if recipe.name in recipes:
                raise ValueError(f"two recipes are named {recipe.name}; give one another variant")
            recipes[recipe.name] = recipe
    return recipes
