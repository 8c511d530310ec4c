"""Entries by name: a registry that imports its built-in entries late, and the nearest names."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

# One for all: modules of one package may look up the entries of another.
_importing = threading.RLock()


class Registry(Mapping[str, T], Generic[T]):
    """Entries of one kind by name.

    ``package`` holds the built-in entries, one module each, or is the one module of them. Its
    modules are imported at the first look-up, so that adding a file there is all it takes to add an
    entry.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package: str | None = package
        self._is_importing = False
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
        self.check_name(name)
        return lambda entry: self.add(name, entry)

    def check_name(self, name: object) -> None:
        """Raise a ``ValueError`` for what a decorator has got in place of its name."""
        if not isinstance(name, str):
            what = getattr(name, "__name__", repr(name))
            raise ValueError(
                f"the name of a {self.kind} must be text, got {what}: write it in the brackets of "
                "the decorator"
            )

    def __getitem__(self, name: str) -> T:
        """Return the entry, or raise a ``ValueError`` that suggests the nearest names."""
        entries = self._all()
        if name not in entries:
            raise ValueError(f"unknown {self.kind} {name!r}{suggestion(name, list(entries))}")
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def imported(self) -> dict[str, T]:
        """Return the entries so far: those of plugins, and the built-in ones after a look-up."""
        return dict(self._entries)

    def _all(self) -> dict[str, T]:
        """Return the entries, after an import of the package at the first call."""
        if self._package is not None:
            with _importing:  # other threads wait for all entries
                self._import_package()
        return self._entries

    def _import_package(self) -> None:
        if self._package is None or self._is_importing:  # looked up by one of its own modules
            return
        self._is_importing = True
        try:
            package, prefix = importlib.import_module(self._package), f"{self._package}."
            for module in pkgutil.iter_modules(getattr(package, "__path__", []), prefix):
                if not module.ispkg:
                    importlib.import_module(module.name)
            self._package = None
        finally:
            self._is_importing = False


def suggestion(name: str, known: list[str]) -> str:
    """Return how a message about an unknown name ends: the nearest names, or all of a few."""
    close = nearest(name, known)
    if close:
        return f"; did you mean {' or '.join(repr(word) for word in close)}?"
    return f"; choose from {', '.join(known)}" if 0 < len(known) <= 20 else ""


def nearest(name: str, known: list[str]) -> list[str]:
    """Return up to three known names that look like ``name``, the most similar first."""
    return difflib.get_close_matches(name, known, n=3)


def _origin(entry: object) -> object:
    """Where a class or function is defined: the same place is the same entry, imported again."""
    entry = getattr(entry, "function", entry)
    name = getattr(entry, "__qualname__", None)
    return entry if name is None else (getattr(entry, "__module__", None), name)
