"""Registrations that end with a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from alignmixup import plugins, registry

REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]


@contextmanager
def kept_registries() -> Iterator[None]:
    """Forget afterwards the plugins and what was registered outside the package meanwhile."""
    imported = dict(plugins._plugins)
    kept = [(kind, set(kind.imported())) for kind in REGISTRIES]
    try:
        yield
    finally:
        plugins._plugins = imported
        for kind, names in kept:
            for name in kind.imported().keys() - names:
                entry = kind._entries[name]
                made = getattr(entry, "function", entry)
                made = made.func if isinstance(made, partial) else made
                if not str(getattr(made, "__module__", None)).startswith("alignmixup."):
                    del kind._entries[name]
