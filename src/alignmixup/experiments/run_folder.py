"""The folder of a run: the recipe in it, its results, and who may write there.

RUN/run.json        the recipe, every setting; "images": their classes, size, normalization;
                    "plugins" to import and "plugin_sha256" of their sources; "init_from",
                    "extended", "first_data". The process that trains there holds its lock
RUN/results.jsonl   one line a figure
RUN/scored.json     which tasks a sweep has done
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, get_type_hints

from alignmixup.checking import check_kind
from alignmixup.contracts import Result
from alignmixup.datasets.loading.layout import is_gone
from alignmixup.experiments.data_record import DataRecord
from alignmixup.experiments.plugins import import_recorded
from alignmixup.files import write_text, writing
from alignmixup.recipes.schema import Recipe
from alignmixup.registry import nearest
from alignmixup.training.checkpoint import CHECKPOINT, POSITION, has_checkpoint, read_facts
from alignmixup.training.settings import check_same

RUN = "run.json"
RESULTS = "results.jsonl"
SCORED = "scored.json"
ADAIN = "adain.safetensors"
CHOOSE_ANOTHER = "choose another folder, out= or --out"
# The settings that a run which is extended may have anew.
SCHEDULE = ("epochs", "warmup_epochs", "milestones", "points")


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` holds: the recipe and what else a run is opened or resumed with.

    ``init_from`` says which run's weights it began with, ``extended`` the numbers of epochs it had
    before it was extended, ``first_data`` the name of its data before their folder was moved.
    """

    recipe: Recipe
    images: DataRecord | None = None
    plugins: tuple[str, ...] = ()
    init_from: Mapping[str, object] | None = None
    extended: tuple[int, ...] = ()
    plugin_sha256: Mapping[str, str] = field(default_factory=dict)
    first_data: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the settings of the recipe and, where there is any, the rest beside them."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        if self.images is not None:
            rest["images"] = dataclasses.asdict(self.images)
        return {**self.recipe.to_json(), **{name: value for name, value in rest.items() if value}}


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of the run in ``folder``."""
    return read_run(folder).recipe


def read_run(folder: Path) -> RunRecord:
    """Read what the run in ``folder`` has recorded; import its plugins.

    A run of an older version has recorded no images.
    """
    path = folder / RUN
    if not path.exists():
        near = nearest(str(folder), [str(run.parent) for run in folder.parent.glob(f"*/{RUN}")])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise FileNotFoundError(f"{path} does not exist: {folder} is not the folder of a run{hint}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        check_kind(f"{path}: plugins", record.get("plugins", []), list[str])
        import_recorded(record.get("plugins", []), folder)
        images: dict[str, Any] | None = record.get("images")
        check_kind(f"{path}: init_from", record.get("init_from"), dict[str, object] | None)
        check_kind(f"{path}: extended", record.get("extended", []), list[int])
        check_kind(f"{path}: plugin_sha256", record.get("plugin_sha256", {}), dict[str, str])
        check_kind(f"{path}: first_data", record.get("first_data"), str | None)
        return RunRecord(
            _recipe(record, path),
            None if images is None else _data_record(images, path),
            tuple(record.get("plugins", ())),
            record.get("init_from"),
            tuple(record.get("extended", ())),
            record.get("plugin_sha256", {}),
            record.get("first_data"),
        )
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it from a copy, or train the recipe again in "
            "another folder"
        ) from None


def _recipe(record: Mapping[str, Any], path: Path) -> Recipe:
    try:
        return Recipe.from_json(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _data_record(images: Mapping[str, Any], path: Path) -> DataRecord:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in images.items()
    }
    record = DataRecord(**values)
    for name, hint in get_type_hints(DataRecord).items():
        check_kind(f"{path}: images.{name}", getattr(record, name), hint)
    return record


def check_folder(
    folder: Path, recipe: Recipe, *, extend: bool = False, init_from: Path | None = None
) -> RunRecord:
    """Return the record of the run to train in the folder, the recipe under the key it has there.

    A run that has saved no step has nothing to protect: another one may take its place. One whose
    folder of images is no longer there may go on at another path: ``claim`` compares the images.

    Raises:
        ValueError: The folder holds a run with other settings, or something else altogether.
    """
    if str(folder).encode(errors="replace").decode() != str(folder):  # bytes that are no text
        raise ValueError(
            f"out (--out) must be a path in UTF-8, which safetensors needs; got {folder!r}"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out (--out) must be a folder; {folder} is a file")
    if not (folder / RUN).exists():
        # A run killed while it claimed its folder leaves these at most.
        beginnings = {f"{RUN}.partial", "tensorboard"}
        if folder.is_dir() and {path.name for path in folder.iterdir()} - beginnings:
            raise ValueError(f"{folder} is not empty and holds no run; {CHOOSE_ANOTHER}")
    if not has_checkpoint(folder / CHECKPOINT) or not (folder / RUN).exists():
        if extend:
            raise ValueError(f"{folder} holds no run to extend: train it first")
        return RunRecord(recipe)
    recorded = read_run(folder)
    # The same folder of images has other names from other directories.
    recipe = dataclasses.replace(recipe, key=recorded.recipe.key, base=recorded.recipe.base)
    before = _extended(folder, recorded, recipe) if extend else recorded.recipe
    if recorded.images is not None and _has_moved(before.data.name, recipe.data.name):
        place = dataclasses.replace(before.data, name=recipe.data.name)
        before = dataclasses.replace(before, data=place)
    known, now = before.to_json(), recipe.to_json()
    if init_from is not None:
        known["init_from"] = (recorded.init_from or {}).get("run")
        now["init_from"] = str(init_from.resolve())
    what = f"{folder} holds a run of {recorded.recipe.name} with other settings"
    remedy = CHOOSE_ANOTHER
    if recipe.train.epochs > before.train.epochs:
        remedy += "; extend=True (--extend) trains a finished run for more epochs"
    check_same(known, now, what, remedy)
    is_longer = before.train.epochs > recorded.recipe.train.epochs
    lengths = (*recorded.extended, recorded.recipe.train.epochs) if is_longer else recorded.extended
    return dataclasses.replace(recorded, recipe=recipe, extended=lengths)


def _has_moved(before: str, now: str) -> bool:
    """Whether data of the name ``before`` are gone, and ``now`` is a path of the same kind."""
    return is_gone(before) and before.partition(":")[0] == now.partition(":")[0]


def _extended(folder: Path, recorded: RunRecord, recipe: Recipe) -> Recipe:
    """Return the recipe of a finished run with the length and the schedule of ``recipe``."""
    epochs, before = recipe.train.epochs, recorded.recipe.train.epochs
    if epochs < before:
        raise ValueError(
            f"the run in {folder} has {before} epochs and cannot be shortened to {epochs}: set "
            "--train.epochs to a larger number"
        )
    reached = read_facts(folder / CHECKPOINT, POSITION)["epoch"]
    if reached < before < epochs:
        raise ValueError(
            f"the run in {folder} is at epoch {reached} of {before}: let it finish, then extend it"
        )
    schedule = {name: getattr(recipe.train, name) for name in SCHEDULE}
    return dataclasses.replace(
        recorded.recipe, train=dataclasses.replace(recorded.recipe.train, **schedule)
    )


def claim(folder: Path, record: RunRecord) -> None:
    """Write the record into the folder of a new run, of one that is extended or has moved images.

    Raises:
        ValueError: The run there was trained on other images.
    """
    if not has_checkpoint(folder / CHECKPOINT):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        _replace(folder, record.to_json())
        return
    recorded = read_run(folder)
    has_moved = record.recipe.data.name != recorded.recipe.data.name
    if recorded.images is not None and record.images is not None:
        others = ("num_train", "num_test") if has_moved else ("name",)
        kept = ("class_names", "image_size", "test_sha256", *others)
        before, now = (
            {name: getattr(images, name) for name in kept}
            for images in (recorded.images, record.images)
        )
        check_same(before, now, f"{folder} holds a run on other images", CHOOSE_ANOTHER)
        _warn_of_other_counts(folder, recorded.images, record.images)
    is_longer = record.extended != recorded.extended
    if has_moved:
        first = recorded.first_data or recorded.recipe.data.name
        record = dataclasses.replace(record, first_data=first)
    if is_longer or has_moved:
        with alone_in(folder):
            if is_longer:  # to be scored for the new last epoch
                (folder / SCORED).unlink(missing_ok=True)
            images = (record if has_moved else recorded).images or record.images
            write_json(folder / RUN, dataclasses.replace(record, images=images).to_json())


def _warn_of_other_counts(folder: Path, before: DataRecord, now: DataRecord) -> None:
    """Deleting a damaged image is no reason to train anew, but the run is no longer the same."""
    counts = [(images.num_train, images.num_test) for images in (before, now)]
    if counts[0] != counts[1]:
        (train, test), (train_now, test_now) = counts
        warnings.warn(
            f"{folder} was begun with {train} training and {test} test images, and {before.name} "
            f"has {train_now} and {test_now} now: restore them, or train anew in another folder, "
            "to compare it with other runs",
            stacklevel=2,
        )


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


class FolderInUse(ValueError):
    """Another process is training in the folder."""


def check_unused(folder: Path) -> None:
    """Raise ``FolderInUse`` if another process is training in the folder."""
    if (folder / RUN).exists():
        with alone_in(folder):
            pass


@contextmanager
def alone_in(folder: Path, lock: Path | None = None, patience: float = 0.0) -> Iterator[None]:
    """Keep a second process out of the folder: the two would write each other's checkpoints.

    ``lock`` is the file that is locked, by default ``run.json``; ``patience`` are the seconds to
    wait for another process to end.
    """
    deadline, path = time.monotonic() + patience, lock or folder / RUN
    # For writing: over NFS, a file that is open for reading cannot be locked for oneself.
    with writing(path):
        file = path.open("r+b")
    with file:
        while not _lock(file, wait=False):
            if time.monotonic() >= deadline:
                raise FolderInUse(
                    f"another process is training in {folder}: wait for it, or {CHOOSE_ANOTHER}"
                )
            time.sleep(0.2)
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
    with writing(path), path.open("ab") as file:
        _lock(file, wait=True)
        kept, size = whole_lines(path), file.seek(0, os.SEEK_END)
        file.truncate(min(len(kept), size))
        lines = "".join(result.to_json() + "\n" for result in results)
        file.write(kept[size:] + lines.encode())


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
    write_text(path, json.dumps(record, indent=2))
