"""Open registries: everything that has a name in a recipe, a run folder or on the command line.

    @register_mixer
    @dataclass(frozen=True)
    class MyMixup(Mixer): ...

A registry holds built-in entries and those of a user's module (a plugin). Files name entries, never
code: ``run.json`` says ``{"kind": "MyMixup"}`` and which plugin to import before it is looked up.
This module imports no torch, so that names can be listed without it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

__all__ = [
    "DATASETS",
    "FIGURES",
    "LOGGERS",
    "MIXERS",
    "MODELS",
    "OPTIMIZERS",
    "RECIPES",
    "TASKS",
    "Registry",
    "import_plugin",
    "imported_plugins",
    "plugin_module",
    "register_mixer",
    "suggestion",
]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Entries of one kind by name.

    ``package`` holds the built-in entries, one module each. Its modules are imported at the first
    look-up, so that adding a file there is all it takes to add an entry.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package: str | None = package
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``; return it.

        Raises:
            ValueError: if another entry has that name. A module that is imported again may register
                the same entries once more.
        """
        there = self._entries.get(name)
        if there is not None and there != entry and _origin(there) != _origin(entry):
            raise ValueError(f"the {self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates under ``name``."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        """Return the entry, or raise a ``ValueError`` that suggests the nearest names."""
        self._import_package()
        if name not in self._entries:
            hint = suggestion(name, list(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_package()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._import_package()
        return iter(self._entries)

    def __len__(self) -> int:
        self._import_package()
        return len(self._entries)

    def _import_package(self) -> None:
        if self._package is None:
            return
        name, self._package = self._package, None  # first: its modules may look entries up
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__, f"{name}."):
            if not module.ispkg:
                importlib.import_module(module.name)


def suggestion(name: str, known: list[str]) -> str:
    """Return how a message about an unknown name ends: the nearest names, or all of a few."""
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(repr(word) for word in close)}?"
    return f"; choose from {', '.join(known)}" if 0 < len(known) <= 20 else ""


def _origin(entry: object) -> object:
    """Where a class or function is defined: the same place is the same entry, imported again."""
    name = getattr(entry, "__qualname__", None)
    return entry if name is None else (getattr(entry, "__module__", None), name)


MIXERS: Registry[Any] = Registry("mixer", "alignmixup.mixers")
MODELS: Registry[Any] = Registry("model", "alignmixup.models")
DATASETS: Registry[Any] = Registry("data set", "alignmixup.datasets")
TASKS: Registry[Any] = Registry("task", "alignmixup.evaluation.tasks")
FIGURES: Registry[Any] = Registry("figure", "alignmixup.figures")
RECIPES: Registry[Any] = Registry("recipe", "alignmixup.recipes")
OPTIMIZERS: Registry[Any] = Registry("optimizer", "alignmixup.training")
LOGGERS: Registry[Any] = Registry("logger", "alignmixup.training")


def register_mixer(mixer: type[T]) -> type[T]:
    """Register a mixer class under its own name, so that runs with it can be resumed and scored.

    Args:
        mixer: A frozen dataclass that extends ``Mixer``.

    Returns:
        The class.

    Example:
        ```python
        from dataclasses import dataclass


        @am.register_mixer
        @dataclass(frozen=True)
        class GentleMixup(am.InputMixup):
            alpha: float = 0.1


        assert am.GentleMixup().alpha == 0.1
        ```
    """
    MIXERS.add(mixer.__name__, mixer)
    return mixer


_plugins: dict[str, ModuleType] = {}


def import_plugin(name: str) -> str:
    """Import a user's module, ``package.module`` or a path ``file.py``, that registers entries.

    Args:
        name: The module's name, importable from the current directory, or the path of a file.

    Returns:
        The name to record in a run: a module's name, or a file's absolute path.
    """
    is_file = name.endswith(".py")
    recorded = str(Path(name).resolve()) if is_file else name
    if recorded in _plugins:
        return recorded
    if is_file:
        _plugins[recorded] = _import_file(Path(recorded))
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            _plugins[recorded] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the plugin was found; something that it imports was not
            raise ValueError(
                f"there is no module {name!r} to import as a plugin; start where it can be "
                "imported, or give the path of its file"
            ) from None
    return recorded


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins imported so far, as a run records them."""
    return tuple(_plugins)


def plugin_module(recorded: str) -> ModuleType:
    """Return an imported plugin by the name that ``import_plugin`` returned."""
    return _plugins[recorded]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"the plugin {path} does not exist")
    name = f"alignmixup_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
