"""Any folder of images, one subfolder per class: ROOT/train/<class>/... and ROOT/val/<class>/...

Classes are the sorted subfolders of ``train``. The ``test`` split is ``val`` if it exists, else
``test`` (in ImageNet, which has both, only ``val`` has labels). Files are found at any depth; files
without the suffix of an image are skipped. A file that is empty or no image raises with its name.

A list of boxes beside the folders (see ``box_lists``) has the boxes of the test images.
``list_images`` and ``load_images`` read a folder of images without classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.loading.box_lists import boxes_in_view, find_box_list, listed_boxes
from alignmixup.datasets.loading.decode import (
    IMAGE_SUFFIXES,
    decode_files,
    empty_images,
    read_rgb,
    unreadable_files,
)
from alignmixup.datasets.loading.layout import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SPLITS,
    check_split,
    path_and_size,
)
from alignmixup.registry import DatasetEntry

FOLDER_SIZE = 64


@dataclass(frozen=True, eq=False)
class FileSet:
    """A labeled set of image files, for sets that do not fit in memory."""

    name: str
    split: str
    paths: tuple[str, ...]
    labels: Int64[Tensor, " n"]
    class_names: tuple[str, ...]
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise ValueError(
                f"{self.name}/{self.split}: {len(self.paths)} files but {len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def in_memory(
        self, images: UInt8[Tensor, "n 3 h w"], boxes: tuple[Tensor, ...] | None = None
    ) -> ImageSet:
        """Return the set with decoded images, and boxes in their pixels."""
        return ImageSet(
            name=self.name,
            split=self.split,
            images=images,
            labels=self.labels,
            class_names=self.class_names,
            mean=self.mean,
            std=self.std,
            boxes=boxes,
        )


@dataclass(frozen=True, eq=False)
class BoxedFileSet(FileSet):
    """A file set with boxes, one tensor [k, 4] per file, in pixels of its image."""

    boxes: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        FileSet.__post_init__(self)
        if len(self.boxes) != len(self.paths):
            raise ValueError(
                f"{self.name}/{self.split}: {len(self.paths)} files but boxes for {len(self.boxes)}"
            )


def scan_folder(root: Path | str, split: str) -> FileSet:
    """List the files of one split; nothing is decoded.

    If ``root`` has a list of boxes, the test split is a ``BoxedFileSet``.
    """
    check_split(split)
    root = Path(root).expanduser()
    class_names = tuple(sorted(_class_folders(_split_folder(root, "train"))))
    here = _class_folders(_split_folder(root, split))
    unknown = sorted(set(here) - set(class_names))
    if unknown:
        raise ValueError(
            f"{here[unknown[0]]} is not a class of {root / 'train'}: add it there, or remove it"
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        files = _image_files(here[class_name]) if class_name in here else []
        if split == "train" and not files:
            raise ValueError(f"{here[class_name]} has no image: fill it or remove it")
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise ValueError(f"{_split_folder(root, split)} has no image: add some to its folders")
    found = FileSet(root.name, split, tuple(paths), torch.tensor(labels), class_names)
    listed = find_box_list(root) if split == "test" else None
    if listed is None:
        return found
    return BoxedFileSet(**vars(found), boxes=listed_boxes(listed, found.paths))


def load_folder(root: Path | str, split: str, image_size: int) -> ImageSet:
    """Decode one split into memory, each image as its centered square of side ``image_size``.

    Boxes, if any, are clipped to the squares; an image that is not in their list, or whose boxes
    are outside of its square, has none.
    """
    return decode_set(scan_folder(root, split), image_size)


def decode_set(files: FileSet, image_size: int, fraction: float = 1.0) -> ImageSet:
    """Decode each file as its centered square, ``fraction`` of the shorter side, boxes with it."""
    images = decode_files(files.paths, image_size, fraction=fraction)
    boxes = None
    if isinstance(files, BoxedFileSet):
        boxes = boxes_in_view(files.boxes, files.paths, image_size, fraction)
    return files.in_memory(images, boxes)


def list_images(folder: Path | str) -> list[str]:
    """Return every image file in ``folder``, at any depth, in order; raise if there is none."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    files = _image_files(folder)
    if not files:
        known = ", ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise ValueError(f"{folder} and its subfolders have no image file ({known})")
    return files


def load_images(
    paths: Sequence[str], image_size: int, how: Literal["resize", "crop"] = "resize"
) -> UInt8[Tensor, "n 3 s s"]:
    """Decode files into memory: their centered squares resized, or their central pixels ("crop").

    Raises for a file that is too small for its crop.
    """
    if how not in ("resize", "crop"):
        raise ValueError(f"how must be 'resize' or 'crop', got {how!r}")
    if how == "resize":
        return decode_files(paths, image_size)
    images = empty_images(len(paths), image_size)
    for image, path in zip(images, paths, strict=True):
        pixels = np.array(read_rgb(path))
        top, left = ((side - image_size) // 2 for side in pixels.shape[:2])
        if min(top, left) < 0:
            raise ValueError(
                f"{path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, too few for a crop of "
                f"{image_size} x {image_size}"
            )
        square = pixels[top : top + image_size, left : left + image_size]
        image.copy_(torch.from_numpy(square).permute(2, 0, 1))
    return images


def check_image_folder(root: Path | str) -> list[str]:
    """Decode every image and return one line for each thing that is missing or damaged."""
    return check_splits(lambda split: scan_folder(root, split).paths)


def check_splits(paths_of: Callable[[str], Sequence[str]]) -> list[str]:
    """Decode the files of both splits; return one line for each problem, also of listing them."""
    problems: list[str] = []
    for split in SPLITS:
        try:
            problems += unreadable_files(paths_of(split))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _split_folder(root: Path, split: str) -> Path:
    names = ("train",) if split == "train" else ("val", "test")
    for name in names:
        if (root / name).is_dir():
            return root / name
    looked_for = " or ".join(str(root / name) for name in names)
    _, at, size = root.name.partition("@")
    hint = f"; the size after @ must be a number of pixels, got {size!r}" if at else ""
    raise FileNotFoundError(
        f"no folder {looked_for}; an image folder has train/ and val/ (or test/), "
        f"each with one subfolder per class{hint if not root.exists() else ''}"
    )


def _class_folders(folder: Path) -> Mapping[str, Path]:
    found = {
        entry.name: folder / entry.name
        for entry in os.scandir(folder)
        if entry.is_dir() and not entry.name.startswith(".")
    }
    if not found:
        raise ValueError(f"{folder} has no subfolders; it needs one per class")
    return found


def _image_files(folder: Path) -> list[str]:
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [  # how os.walk skips
            name
            for name in folders
            if not name.startswith(".") and not _leads_back(os.path.join(place, name))
        ]
        found += [
            os.path.join(place, name)
            for name in names
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def _leads_back(folder: str) -> bool:
    """Whether this is a link to a folder that it is in: its files would be found again in it.

    Also by way of other links: of two folders that link to each other, each is in the other.
    """
    if not os.path.islink(folder):
        return False
    target = os.path.realpath(folder)
    return any(parent.resolve().is_relative_to(target) for parent in Path(folder).parents)


def folder_entry(name: str) -> DatasetEntry:
    """Return the data set ``folder:PATH`` or ``folder:PATH@SIZE``; the size defaults to 64."""
    path, given_size = path_and_size(name, "folder:")
    size = FOLDER_SIZE if given_size is None else given_size
    return DatasetEntry(
        name=name,
        function=lambda _root, split: load_folder(path, split, size),
        description=f"images in the class folders of {path}/train and {path}/val or {path}/test",
        image_size=size,
        check=lambda _root: check_image_folder(path),
        scan=lambda _root, split: scan_folder(path, split),
    )
