"""The folder of a run: the recipe in it, its results, and who may write there.

RUN/run.json        the recipe, every setting, and "images": their classes, size, normalization;
                    the process that trains there holds its lock
RUN/results.jsonl   one line a figure
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from alignmixup.contracts import Result
from alignmixup.experiments.data_record import DataRecord
from alignmixup.recipes.schema import Recipe
from alignmixup.training.checkpoint import CHECKPOINT
from alignmixup.training.settings import check_same

__all__ = [
    "ADAIN",
    "RESULTS",
    "RUN",
    "alone_in",
    "append_results",
    "check_folder",
    "claim",
    "read_data_record",
    "read_recipe",
    "whole_lines",
    "write_json",
]

RUN = "run.json"
RESULTS = "results.jsonl"
ADAIN = "adain.safetensors"


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of the run in ``folder``."""
    return _read(folder)[0]


def read_data_record(folder: Path) -> DataRecord | None:
    """Return what the run in ``folder`` keeps of its images; None for a run of an older version."""
    return _read(folder)[1]


def _read(folder: Path) -> tuple[Recipe, DataRecord | None]:
    path = folder / RUN
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {folder} is not the folder of a run")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        images: dict[str, Any] | None = record.get("images")
        if images is not None:
            images = {k: tuple(v) if isinstance(v, list) else v for k, v in images.items()}
        return Recipe.from_json(record), None if images is None else DataRecord(**images)
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def check_folder(folder: Path, recipe: Recipe) -> Recipe:
    """Return the recipe to train in the folder, under the name that a run of it there has.

    A run that has saved no step has nothing to protect: another one may take its place.

    Raises:
        ValueError: The folder holds a run with other settings, or something else altogether.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, where the folder of the run should be: other --out")
    if not (folder / RUN).exists():
        # A run killed while it claimed its folder leaves these at most.
        beginnings = {f"{RUN}.partial", "tensorboard"}
        if folder.is_dir() and {path.name for path in folder.iterdir()} - beginnings:
            raise ValueError(f"{folder} is not empty and holds no run; choose another --out")
        return recipe
    if not (folder / CHECKPOINT).exists():
        return recipe
    there = read_recipe(folder)
    # The same folder of images has other names from other directories.
    ours = dataclasses.replace(recipe, name=there.name).to_json()
    what = f"{folder} holds a run of {there.name} with other settings"
    check_same(there.to_json(), ours, what, "choose another --out")
    return dataclasses.replace(recipe, name=there.name)


def claim(folder: Path, recipe: Recipe, images: DataRecord) -> None:
    """Write the recipe and what is known of its images into the folder of a new run.

    Raises:
        ValueError: The run there was trained on other images.
    """
    record = {**recipe.to_json(), "images": dataclasses.asdict(images)}
    if not (folder / CHECKPOINT).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder, record)
        return
    there = read_data_record(folder)
    if there is None:
        return
    kept = ("name", "class_names", "image_size", "test_sha256")
    before, now = ({name: getattr(each, name) for name in kept} for each in (there, images))
    check_same(before, now, f"{folder} holds a run on other images", "choose another --out")


def _replace(folder: Path, record: Mapping[str, object]) -> None:
    """Write run.json, unless another process is training there or it is the same already."""
    path = folder / RUN
    if not path.exists():
        write_json(path, record)
        return
    with alone_in(folder):
        if json.loads(json.dumps(record)) != _json(path):
            (folder / ADAIN).unlink(missing_ok=True)  # for other images, perhaps
            write_json(path, record)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # damaged
        return None


@contextmanager
def alone_in(folder: Path, name: str = RUN) -> Iterator[None]:
    """Keep a second process out of the folder: the two would write each other's checkpoints.

    ``name`` is the file in it that is locked.
    """
    with (folder / name).open("rb") as file:
        if not _lock(file, wait=False):
            raise ValueError(
                f"another process is training in {folder}: wait for it, or take another --out"
            )
        yield


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Lock an open file for ourselves; False where another has it and we do not ``wait``.

    The lock is the system's and goes with the open file or the process, however that ends. Where
    there are no such locks, it is as if nobody else were there.
    """
    try:
        import fcntl
    except ImportError:  # a system without them
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without them
        pass
    return True


def append_results(folder: Path, results: list[Result]) -> None:
    """Append results to the run's file; nothing is ever overwritten, whoever else appends.

    A last line that a kill or a full disk has cut short goes: what is appended behind it would be
    part of it.
    """
    path = folder / RESULTS
    try:
        with path.open("ab") as file:
            _lock(file, wait=True)
            kept, size = whole_lines(path), file.seek(0, os.SEEK_END)
            file.truncate(min(len(kept), size))
            lines = "".join(result.to_json() + "\n" for result in results)
            file.write(kept[size:] + lines.encode())
    except OSError as error:
        raise OSError(f"cannot write the results to {path}: {error.strerror}") from error


def whole_lines(path: Path) -> bytes:
    """The lines of a file that are whole, each with its end; of no file none."""
    text = path.read_bytes() if path.exists() else b""
    end = text.rfind(b"\n") + 1
    try:
        json.loads(text[end:])
    except ValueError:  # cut short, or nothing there
        return text[:end]
    return text + b"\n"


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a record whole or not at all, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2), encoding="utf-8")
    os.replace(partial, path)
