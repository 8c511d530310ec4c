"""Files that are written whole or not at all, and errors that name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in errors of writing: a full disk raises without the name of the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write {path}: {reason}") from error


def make_folder(path: Path) -> Path:
    """Make a folder, and those above it, unless it is there; return it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file has its name or that of a folder above it" if is_file else error.strerror
        text = f"cannot make the folder {path}: {reason}; choose another"
        raise type(error)(text) from error
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield another path to write to; at the end of the block it takes the place of ``path``.

    After an error ``path`` is as it was before, and the other one is gone.
    """
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, whenever the process is killed."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
