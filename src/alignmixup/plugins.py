"""A user's modules, imported for what they register."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_plugins: dict[str, ModuleType] = {}
_digests: dict[str, str] = {}  # of their sources as they were imported


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
        if "" in name.split("."):  # a relative name
            raise ValueError(
                f"{name!r} is no plugin: give the name of a module, or the path of a .py file"
            )
        try:
            _plugins[recorded] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _missing(name, error) from error
            raise ValueError(
                f"no module {name!r} to import as a plugin; run from the folder that contains it, "
                "or give the path of its file"
            ) from None
    _digests[recorded] = _digest(_plugins[recorded])
    return recorded


def imported_plugins() -> tuple[str, ...]:
    """Return the plugins imported so far, as a run records them."""
    return tuple(_plugins)


def plugin_module(recorded: str) -> ModuleType:
    """Return an imported plugin by the name that ``import_plugin`` returned."""
    return _plugins[recorded]


def source_digest(name: str) -> str:
    """Return eight digits of the SHA-256 of a plugin as it was imported, or of another module."""
    return _digests[name] if name in _digests else _digest(sys.modules.get(name))


def _digest(module: ModuleType | None) -> str:
    """Hash the file of a module, or all those of a package; empty if it has none."""
    file = Path(getattr(module, "__file__", None) or "")
    if not file.is_file():  # a folder without __init__.py, a module in an archive
        return ""
    files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
    digest = hashlib.sha256()
    for each in files:
        digest.update(each.read_bytes())
    return digest.hexdigest()[:8]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"the plugin {path} does not exist")
    name = f"alignmixup_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _missing(str(path), error) from error
    return module


def _missing(plugin: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The plugin was found; something that it imports was not."""
    text = f"the plugin {plugin} imports a module that is not installed: {error}"
    return ModuleNotFoundError(text, name=error.name)
