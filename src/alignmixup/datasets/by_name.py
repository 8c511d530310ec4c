"""Every data set by name: load, check and fetch it.

    load("cifar10", "train")   load("folder:/pictures/birds@96", "test")   load("shapes", "train")

The data are in ``root``, by default the folder in ALIGNMIXUP_DATA, else ``./datasets``.
"""

from __future__ import annotations

from pathlib import Path

from alignmixup.checking import check_call
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import folder_entry
from alignmixup.datasets.loading.download import Archive, Progress, download, unpack
from alignmixup.datasets.loading.layout import check_split, data_root
from alignmixup.datasets.shards import shards_entry
from alignmixup.registry import DATASETS, DatasetEntry, suggestion


def names() -> tuple[str, ...]:
    """Return every name that ``load`` accepts; ``folder:PATH`` is any folder of images."""
    return (*sorted(DATASETS), "folder:PATH", "shards:PATH")


def find(name: str) -> DatasetEntry:
    """Return the data set of that name; ``folder:PATH`` or ``folder:PATH@SIZE`` is any folder.

    ``shards:PATH`` are tar files of images.
    """
    if name.startswith("folder:"):
        return folder_entry(name)
    if name.startswith("shards:"):
        return shards_entry(name)
    if name not in DATASETS:
        is_path = name and Path(name).is_dir()
        hint = f"; did you mean folder:{name}?" if is_path else suggestion(name, list(names()))
        raise ValueError(f"unknown data set {name!r}{hint}")
    return DATASETS[name]


def load(name: str, split: str, root: Path | str | None = None) -> ImageSet:
    """Load the ``train`` or ``test`` split of a data set into memory."""
    check_split(split)
    function = find(name).function
    check_call(f"the data set {name!r}", function, "root", "split")
    images = function(_path(root), split)
    if not isinstance(images, ImageSet):
        raise ValueError(
            f"the function that loads {name!r} must return an ImageSet, got {type(images).__name__}"
        )
    return images


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Return one line for each thing that is missing or damaged."""
    look = find(name).check
    return look(_path(root)) if look else []


def locate(root: Path | str | None = None) -> dict[str, Path | None]:
    """Return where the files of each data set are, None where they are not found.

    It looks for folders only; ``check`` reads the files. A data set without files is not listed.
    """
    found: dict[str, Path | None] = {}
    for name in sorted(DATASETS):
        look = DATASETS[name].find
        if look is not None:
            try:
                found[name] = look(_path(root))
            except FileNotFoundError:
                found[name] = None
    return found


def fetch(
    name: str,
    root: Path | str | None = None,
    on_progress: Progress | None = None,
    *,
    url: str | None = None,
) -> Path:
    """Download and unpack a data set, unless it is complete, and return its folder.

    ``url`` names a mirror; the checksum stays that of the official file. The archive is kept.
    """
    entry = find(name)
    wanted: Archive | None = entry.archive
    if entry.by_hand:
        raise ValueError(f"{name} cannot be downloaded by a program: {entry.by_hand}")
    if wanted is None:
        raise ValueError(f"{name} has nothing to download: {entry.description}")
    place = data_root(root)
    if place.name == wanted.folder:  # the folder of the set itself, which load takes, too
        place = place.parent
    folder = place / wanted.folder
    there = locate(place).get(name) or folder  # it may be there in another layout
    if there.is_dir() and not check(name, place):
        return there
    target = place / wanted.filename
    unpack(download(url or wanted.url, target, wanted.checksum, on_progress), place)
    problems = check(name, place)
    if problems:
        raise ValueError(f"{name} was unpacked to {folder} but is not complete: {problems[0]}")
    return folder


def _path(root: Path | str | None) -> Path | None:
    return None if root is None else Path(root)
