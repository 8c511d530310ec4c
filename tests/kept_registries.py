"""Registrations of a test that end with it."""

from contextlib import contextmanager

from alignmixup.registry import DATASETS, MODELS, TASKS


@contextmanager
def kept_registries():
    """Restore the registered models, data sets and tasks afterwards."""
    kept = [(registry, dict(registry)) for registry in (MODELS, DATASETS, TASKS)]
    try:
        yield
    finally:
        for registry, entries in kept:
            registry._entries = entries
