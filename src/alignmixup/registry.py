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
    "register_logger",
    "register_mixer",
    "register_optimizer",
    "suggestion",
]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Entries of one kind by name.

    ``package`` holds the built-in entries, one module each, or is the one module of them. Its
    modules are imported at the first look-up, so that adding a file there is all it takes to add an
    entry.
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
        for module in pkgutil.iter_modules(getattr(package, "__path__", []), f"{name}."):
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
OPTIMIZERS: Registry[Any] = Registry("optimizer", "alignmixup.training.optim")
LOGGERS: Registry[Any] = Registry("logger", "alignmixup.training.loggers")


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


def register_optimizer(name: str) -> Callable[[T], T]:
    """Register a function that makes an optimizer, chosen by ``train.optimizer``.

    Args:
        name: The value of ``train.optimizer``.

    Returns:
        A decorator of ``make(groups, settings)``, which returns a ``torch.optim.Optimizer``. Each
        of ``groups`` has ``params``, ``lr`` (a tensor on a GPU) and ``weight_decay``; ``settings``
        are the run's ``TrainSettings``.

    Example:
        ```python
        @am.register_optimizer("radam")
        def radam(groups, settings):
            return torch.optim.RAdam(groups, betas=(settings.momentum, 0.999))
        ```
    """
    return OPTIMIZERS.register(name)


def register_logger(name: str) -> Callable[[T], T]:
    """Register a logger, chosen by ``--logger NAME`` and ``train(loggers=[NAME])``.

    Args:
        name: The name to choose it by.

    Returns:
        A decorator of a class or function that is called with the folder of the run and returns an
        ``am.Logger``.

    Example:
        ```python
        @am.register_logger("print")
        class Print(am.Logger):
            def __init__(self, folder):
                self.folder = folder

            def log(self, values, epoch):
                print(self.folder, epoch, values["train/mixed_loss"])
        ```
    """
    return LOGGERS.register(name)


_plugins: list[str] = []


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
        _import_file(Path(recorded))
    else:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the plugin was found; something that it imports was not
            raise ValueError(
                f"there is no module {name!r} to import as a plugin; start where it can be "
                "imported, or give the path of its file"
            ) from None
    _plugins.append(recorded)
    return recorded


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins imported so far, as a run records them."""
    return tuple(_plugins)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"the plugin {path} does not exist")
    name = f"alignmixup_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
