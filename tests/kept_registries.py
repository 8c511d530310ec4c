"""Registrations that end with a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from alignmixup import registry

REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]


@contextmanager
def kept_registries() -> Iterator[None]:
    """Forget afterwards the plugins and what was registered outside the package meanwhile."""
    plugins = dict(registry._plugins)
    kept = [(kind, set(kind.imported())) for kind in REGISTRIES]
    try:
        yield
    finally:
        registry._plugins = plugins
        for kind, names in kept:
            for name in kind.imported().keys() - names:
                entry = kind._entries[name]
                function = getattr(entry, "function", entry)
                module = getattr(getattr(function, "func", function), "__module__", None)  # partial
                if not str(module).startswith("alignmixup."):
                    del kind._entries[name]
