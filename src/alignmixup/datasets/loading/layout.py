"""Where data sets are on disk, the names of their splits, and the statistics they share.

Every data set has two splits, ``train`` and ``test``; ``test`` is the labeled split for evaluation
(for Tiny-ImageNet and ImageNet the official folder is called ``val``).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

SPLITS = ("train", "test")

# The paper's protocol normalizes CIFAR-10, CIFAR-100 and Tiny-ImageNet by these numbers. The std is
# not that of CIFAR-10's pixels (0.2470, 0.2435, 0.2616) but the mean over images of their own std;
# it is kept so that results compare with the paper's.
PROTOCOL_MEAN = (0.4914, 0.4822, 0.4465)
PROTOCOL_STD = (0.2023, 0.1994, 0.2010)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def check_split(split: str) -> None:
    """Raise unless ``split`` is "train" or "test"."""
    if split not in SPLITS:
        hint = " (the evaluation split of every data set is 'test')" if "val" in split else ""
        raise ValueError(f"unknown split {split!r}; choose 'train' or 'test'{hint}")


def data_root(root: Path | str | None = None) -> Path:
    """Return ``root``, else the folder named by ALIGNMIXUP_DATA, else ``./datasets``."""
    return Path(root or os.environ.get("ALIGNMIXUP_DATA") or "datasets").expanduser()


def find_folder(
    source: str,
    tried: Sequence[Path],
    holds: Sequence[str],
    remedy: str = "",
    flag: str = "--data",
) -> Path:
    """Return the first of the folders that has all of ``holds``; else raise with the remedy.

    ``flag`` is that of the command line that names the folder above.
    """
    for folder in tried:
        if folder.is_dir() and all((folder / name).exists() for name in holds):
            return folder
    remedy = remedy or f"run 'alignmixup data fetch {source}'"
    wanted = f"{' and '.join(holds)} in any" if holds else "folder, none"
    raise FileNotFoundError(
        f"{source}: no {wanted} of {', '.join(map(str, tried))}; {remedy}, or name the folder that "
        f"contains it with {flag} or ALIGNMIXUP_DATA"
    )


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is damaged or not UTF-8 text ({error}): unpack it again, or save it as UTF-8"
        ) from None


# Before a path, they say what is there: folders of images, or shards.
PATH_PREFIXES = ("folder:", "shards:")


def absolute(name: str) -> str:
    """Return the name with the path in it, if there is one, made absolute."""
    for prefix in PATH_PREFIXES:
        if name.startswith(prefix):
            path, size = path_and_size(name, prefix)
            at = "" if size is None else f"@{size}"
            return f"{prefix}{os.path.abspath(path.expanduser())}{at}"
    return name


def is_gone(name: str) -> bool:
    """Whether the name has a path that does not exist, or a pattern that no file matches."""
    prefix = next((p for p in PATH_PREFIXES if name.startswith(p)), None)
    if prefix is None:
        return False
    path = path_and_size(name, prefix)[0].expanduser()
    if "{split}" in name:
        return not glob.glob(str(path).replace("{split}", "*"))
    return not path.exists()


def path_and_size(name: str, prefix: str) -> tuple[Path, int | None]:
    """Split ``prefix``PATH@SIZE into the path and the size, None where none is given."""
    match = re.fullmatch(prefix + r"(?P<path>.+?)(?:@(?P<size>\d+))?", name)
    if match is None:
        raise ValueError(f"{name!r} names no path; write {prefix}PATH or {prefix}PATH@SIZE")
    path, whole = Path(match["path"]), Path(name.removeprefix(prefix))
    if match["size"] and not path.expanduser().exists() and whole.expanduser().is_dir():
        return whole, None  # the folder's own name ends in @SIZE
    return path, int(match["size"]) if match["size"] else None
