"""Recipes by name or from a user's file, and the plugins that a run names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from alignmixup.checking import check_call
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.records import held_mixers
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import (
    import_plugin,
    imported_plugins,
    plugin_module,
    source_digest,
    suggestion,
)


def open_recipe(name: str) -> Recipe:
    """Return a recipe of the catalog, or that of a user's file: ``my_recipes.py:my_recipe``.

    The file is imported as a plugin; the name behind the colon is a function without arguments that
    returns a ``Recipe``.
    """
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return find_recipe(name)
    module = plugin_module(import_plugin(path))
    make = vars(module).get(function)
    if not callable(make):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise ValueError(f"{path} has no function {function!r}{suggestion(function, functions)}")
    check_call(name, make)
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name} must return a Recipe, got {type(recipe).__name__}")
    return recipe


def import_recorded(names: Iterable[str], run: Path) -> None:
    """Import the plugins that a run was trained with.

    A file that has been moved may be imported beforehand, by ``--plugin`` with its new path. One in
    the run's own folder is not imported for the run's sake: it may have come with it from others.
    """
    for name in names:
        if _is_within(name, run) and name not in imported_plugins():
            raise ValueError(
                f"{run} names a plugin in its own folder, {name}: if you trust it, import it with "
                "--plugin"
            )
        try:
            import_plugin(name)
        except Exception as error:  # whatever the user's code raises
            if _stem(name) not in map(_stem, imported_plugins()):
                what = (
                    error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                )
                raise ValueError(
                    f"{run} was trained with the plugin {name}, which cannot be imported "
                    f"({what}): correct it, or name its new path with --plugin, under the same "
                    f"name {_stem(name)!r}"
                ) from error


def plugins_of(recipe: Recipe) -> tuple[str, ...]:
    """Return what to import before this recipe is read again: plugins, and its mixers' modules.

    A script that is being run cannot be imported without running it again: it is left out.
    """
    homes = [type(mixer).__module__ for mixer in held_mixers(recipe.mixer)]
    ours = ("alignmixup.", "alignmixup_plugin_")
    others = [home for home in homes if home != "__main__" and not home.startswith(ours)]
    return tuple(dict.fromkeys([*imported_plugins(), *others]))


def digests_of(plugins: Iterable[str]) -> dict[str, str]:
    """Return which source each plugin has, by its name without folders, which may be elsewhere.

    Plugins of one name are one entry.
    """
    digests: dict[str, set[str]] = {}
    for name in plugins:
        if digest := source_digest(name):
            digests.setdefault(_stem(name), set()).add(digest)
    return {name: "+".join(sorted(found)) for name, found in digests.items()}


def warn_of_edits(run: Path, recorded: Mapping[str, str]) -> None:
    """Warn where a run goes on with another source of a plugin than it was begun with."""
    now = digests_of(imported_plugins())
    edited = [name for name, digest in recorded.items() if now.get(name, digest) != digest]
    if edited:
        warnings.warn(
            f"{run} was begun with another version of the plugin {', '.join(edited)}, which its "
            "results name: restore it, or train anew in another folder, to compare it with other "
            "runs",
            stacklevel=2,
        )


def _is_within(plugin: str, folder: Path) -> bool:
    """Whether the file of a plugin, or its package, lies in this folder."""
    place = Path(plugin) if plugin.endswith(".py") else Path(plugin.partition(".")[0])
    places = [path for path in (place, place.with_suffix(".py")) if path.exists()]
    return any(folder.resolve() in path.resolve().parents for path in places)


def _stem(plugin: str) -> str:
    """The last part of a module's name, or the name of a file without its suffix."""
    return Path(plugin.removesuffix(".py")).name.rpartition(".")[2]
