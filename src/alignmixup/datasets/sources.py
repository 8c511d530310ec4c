"""Every data set by name: what it is, how to load it, check it and fetch it.

    load("cifar10", "train")   load("folder:/pictures/birds@96", "test")   load("shapes", "train")

Data lie in ``root``, else in the folder named by ALIGNMIXUP_DATA, else in ``./datasets``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from alignmixup.contracts import ImageSet
from alignmixup.datasets.cifar import CIFAR10, CIFAR100, CifarLayout, check_cifar, load_cifar
from alignmixup.datasets.cub import BY_HAND as CUB_BY_HAND, CUB, check_cub, load_cub, scan_cub
from alignmixup.datasets.folder import FileSet, check_folder, load_folder, scan_folder
from alignmixup.datasets.imagenet import (
    BY_HAND,
    IMAGENET,
    check_imagenet,
    load_imagenet,
    scan_imagenet,
)
from alignmixup.datasets.layout import check_split, data_root
from alignmixup.datasets.loading.download import Archive, Progress, download, unpack
from alignmixup.datasets.shapes import SHAPE_NAMES, shapes
from alignmixup.datasets.tiny_imagenet import TINY, check_tiny, load_tiny

__all__ = ["Source", "absolute", "check", "fetch", "find", "load", "names"]

FOLDER_SIZE = 64


@dataclass(frozen=True)
class Source:
    """One data set. ``num_classes`` is None where it depends on the folder.

    ``scan`` lists the files of a split, where there is one file an image, for those who stream
    them. ``by_hand`` says how to get a set that no program can fetch.
    """

    name: str
    description: str
    image_size: int
    num_classes: int | None
    load: Callable[[Path | None, str], ImageSet]
    check: Callable[[Path | None], list[str]]
    archive: Archive | None = None
    scan: Callable[[Path | None, str], FileSet] | None = None
    by_hand: str = ""


def names() -> tuple[str, ...]:
    """Every name that ``load`` knows; ``folder:PATH`` stands for any folder of images."""
    return (*_SOURCES, "folder:PATH")


def find(name: str) -> Source:
    """Return the source of that name; ``folder:PATH`` or ``folder:PATH@SIZE`` is any folder."""
    if name.startswith("folder:"):
        return _folder_source(name)
    if name not in _SOURCES:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(names())}")
    return _SOURCES[name]


def load(name: str, split: str, root: Path | str | None = None) -> ImageSet:
    """Load the ``train`` or ``test`` split of a data set into memory."""
    check_split(split)
    return find(name).load(_path(root), split)


def check(name: str, root: Path | str | None = None) -> list[str]:
    """Say what is missing or damaged, one line each, files named; an empty list is good news."""
    return find(name).check(_path(root))


def fetch(
    name: str,
    root: Path | str | None = None,
    on_progress: Progress | None = None,
    *,
    url: str | None = None,
) -> Path:
    """Download and unpack a data set, and return its folder; nothing is done if it is whole.

    ``url`` names a mirror; the checksum stays that of the official file. The archive is kept.
    """
    source = find(name)
    if source.by_hand:
        raise ValueError(f"{name} cannot be fetched by a program: {source.by_hand}")
    if source.archive is None:
        raise ValueError(f"{name} has nothing to download: {source.description}")
    place = data_root(root)
    folder = place / source.archive.folder
    if folder.is_dir() and not source.check(place):
        return folder
    archive = download(
        url or source.archive.url,
        place / source.archive.filename,
        source.archive.checksum,
        on_progress,
    )
    unpack(archive, place)
    problems = source.check(place)
    if problems:
        raise ValueError(f"{name} was unpacked to {folder}, but is not whole: {problems[0]}")
    return folder


def _path(root: Path | str | None) -> Path | None:
    return None if root is None else Path(root)


def absolute(name: str) -> str:
    """Return the name with the path of a folder:PATH made absolute; other names as they are."""
    if not name.startswith("folder:"):
        return name
    path, size = _folder_and_size(name)
    return f"folder:{os.path.abspath(path.expanduser())}{'' if size is None else f'@{size}'}"


def _folder_and_size(name: str) -> tuple[Path, int | None]:
    match = re.fullmatch(r"folder:(?P<path>.+?)(?:@(?P<size>\d+))?", name)
    if match is None:
        raise ValueError(f"{name!r} names no folder; write folder:PATH or folder:PATH@SIZE")
    path, whole = Path(match["path"]), Path(name.removeprefix("folder:"))
    if match["size"] and not path.expanduser().exists() and whole.expanduser().is_dir():
        return whole, None  # its own name ends so
    return path, int(match["size"]) if match["size"] else None


def _folder_source(name: str) -> Source:
    path, given_size = _folder_and_size(name)
    size = FOLDER_SIZE if given_size is None else given_size
    return Source(
        name=name,
        description=f"images in the class folders of {path}/train and {path}/val or {path}/test",
        image_size=size,
        num_classes=None,
        load=lambda _root, split: load_folder(path, split, size),
        check=lambda _root: check_folder(path),
        scan=lambda _root, split: scan_folder(path, split),
    )


def _cifar_source(layout: CifarLayout, sha256: str) -> Source:
    filename = layout.python_folder.removesuffix("-batches-py").removesuffix("-python")
    return Source(
        name=layout.name,
        description=f"{layout.num_classes} classes, 50,000 train and 10,000 test images, 32 x 32",
        image_size=32,
        num_classes=layout.num_classes,
        load=partial(load_cifar, layout),
        check=partial(check_cifar, layout),
        archive=Archive(
            url=f"https://www.cs.toronto.edu/~kriz/{filename}-python.tar.gz",
            checksum=f"sha256:{sha256}",
            folder=layout.python_folder,
        ),
    )


_SOURCES = {
    source.name: source
    for source in (
        _cifar_source(CIFAR10, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
        _cifar_source(CIFAR100, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
        Source(
            name="tiny",
            description="Tiny-ImageNet-200: 100,000 train images and the 10,000 of its official "
            "val as test, 64 x 64, with boxes",
            image_size=TINY.image_size,
            num_classes=TINY.num_classes,
            load=load_tiny,
            check=check_tiny,
            archive=Archive(
                url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                checksum="sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                folder="tiny-imagenet-200",
            ),
        ),
        Source(
            name="imagenet",
            description="ImageNet-1k: 1,281,167 train images and the 50,000 of its official val as "
            "test, streamed from their files; to be unpacked by hand",
            image_size=224,
            num_classes=IMAGENET.num_classes,
            load=load_imagenet,
            check=check_imagenet,
            scan=scan_imagenet,
            by_hand=BY_HAND,
        ),
        Source(
            name="cub200",
            description="CUB-200-2011: birds, 5,994 train and 5,794 test images with boxes, "
            "squashed to 224 x 224; to be unpacked by hand",
            image_size=224,
            num_classes=CUB.num_classes,
            load=load_cub,
            check=check_cub,
            scan=scan_cub,
            by_hand=CUB_BY_HAND,
        ),
        Source(
            name="shapes",
            description="built in: ten shapes drawn on the spot, 5,000 train and 1,000 test "
            "images, 32 x 32, with boxes",
            image_size=32,
            num_classes=len(SHAPE_NAMES),
            load=lambda _root, split: shapes(split),
            check=lambda _root: [],
        ),
    )
}
