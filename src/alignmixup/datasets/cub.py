"""CUB-200-2011 from its official folder: birds of 200 species, one box per image.

    images/<class>/<name>.jpg    images.txt               <id> <class>/<name>.jpg
    classes.txt  <id> <class>    image_class_labels.txt   <id> <class id>
                                 train_test_split.txt     <id> <1 for training>
                                 bounding_boxes.txt       <id> <x> <y> <width> <height>

Images are squashed to a square, as in the localization protocol, and boxes with them; a box is (x0,
y0, x1, y1) with x1 = x + width exclusive. In memory, the 11,788 images take 1.8 GB at 224 pixels;
``scan_cub`` lists the files for streaming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import BoxedFileSet, check_splits
from alignmixup.datasets.loading.decode import center_square, empty_images, read_rgb
from alignmixup.datasets.loading.layout import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    check_split,
    data_root,
    find_folder,
    read_lines,
)
from alignmixup.registry import register_dataset

T = TypeVar("T")


@dataclass(frozen=True)
class CubLayout:
    """The expected number of images and classes."""

    num_images: int = 11_788
    num_train: int = 5_994
    num_classes: int = 200


CUB = CubLayout()

BY_HAND = (
    "download CUB_200_2011.tgz from the page of its authors (Caltech) and unpack it in the folder "
    "of the data sets"
)


def scan_cub(root: Path | str | None, split: str, layout: CubLayout = CUB) -> BoxedFileSet:
    """List the files of one split with labels and boxes; nothing is decoded."""
    check_split(split)
    folder = _find(root)
    class_names = _columns(folder / "classes.txt", layout.num_classes, 1, _class_name)
    names = _columns(folder / "images.txt", layout.num_images, 1, lambda w: w[0])
    labels = _columns(folder / "image_class_labels.txt", layout.num_images, 1, lambda w: int(w[0]))
    flags = folder / "train_test_split.txt"
    is_train = _columns(flags, layout.num_images, 1, lambda w: bool(("0", "1").index(w[0])))
    boxes = _columns(folder / "bounding_boxes.txt", layout.num_images, 4, _box)
    if sum(is_train.values()) != layout.num_train:
        raise ValueError(
            f"{flags} is damaged: {sum(is_train.values())} training images, not "
            f"{layout.num_train}; unpack the archive again"
        )
    known = sorted(class_names)
    chosen = [i for i in names if is_train[i] == (split == "train")]
    for i in chosen:
        if labels[i] not in class_names:
            raise ValueError(
                f"{folder / 'image_class_labels.txt'} is damaged: image {i} has class {labels[i]}, "
                f"but classes are {known[0]} to {known[-1]}; unpack the archive again"
            )
    prefix = f"{folder / 'images'}{os.sep}"
    return BoxedFileSet(
        name="cub200",
        split=split,
        paths=tuple(prefix + names[i] for i in chosen),
        labels=torch.tensor([known.index(labels[i]) for i in chosen], dtype=torch.int64),
        class_names=tuple(class_names[k] for k in known),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        boxes=tuple(torch.tensor([boxes[i]]) for i in chosen),
    )


def load_cub(
    root: Path | str | None,
    split: str,
    image_size: int = 224,
    layout: CubLayout = CUB,
    num_workers: int | None = None,
) -> ImageSet:
    """Decode one split into memory, each image squashed to ``image_size``, its box with it.

    A box is clipped to its image.
    """
    files = scan_cub(root, split, layout)
    images = empty_images(len(files), image_size)
    sizes = np.empty((len(files), 2), np.float64)

    def decode(i: int) -> None:
        image = read_rgb(files.paths[i])
        square = center_square(image, image_size, squash=True)
        images[i], sizes[i] = torch.from_numpy(np.array(square)).permute(2, 0, 1), image.size

    # Pillow releases the GIL while it decodes and resizes, so threads help for large photographs.
    with ThreadPoolExecutor(num_workers) as pool:
        for _ in pool.map(decode, range(len(files))):
            pass  # raises the errors of the workers
    return files.in_memory(images, _scaled(files, sizes, image_size))


def check_cub(root: Path | str | None, layout: CubLayout = CUB) -> list[str]:
    """Decode every image and return one line for each thing that is missing or damaged."""
    return check_splits(lambda split: scan_cub(root, split, layout).paths)


def _columns(
    path: Path, num_lines: int, num_columns: int, parse: Callable[[Sequence[str]], T]
) -> dict[int, T]:
    """Read lines '<id> <words>' in the order of the file; raise for any other, or a second id."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; unpack the archive again")
    found: dict[int, T] = {}
    for number, line in enumerate(read_lines(path), start=1):
        words = line.split()
        try:
            if len(words) != 1 + num_columns or int(words[0]) in found:
                raise ValueError
            found[int(words[0])] = parse(words[1:])
        except ValueError:
            raise ValueError(
                f"{path} is damaged: cannot read line {number}, {line!r}; unpack the archive again"
            ) from None
    if sorted(found) != list(range(1, num_lines + 1)):
        raise ValueError(
            f"{path} is damaged: {len(found)} ids, not 1 to {num_lines}; unpack the archive again"
        )
    return found


def _class_name(words: Sequence[str]) -> str:
    # "001.Black_footed_Albatross"
    return words[0].partition(".")[2].replace("_", " ") or words[0]


def _box(words: Sequence[str]) -> tuple[float, float, float, float]:
    x, y, width, height = (float(word) for word in words)
    if not (width > 0 and height > 0 and np.isfinite([x, y, width, height]).all()):
        raise ValueError
    return x, y, x + width, y + height


def _scaled(files: BoxedFileSet, sizes: np.ndarray, image_size: int) -> tuple[Tensor, ...]:
    """Return the boxes in pixels of the squares."""
    scale = image_size / torch.from_numpy(sizes).repeat(1, 2)
    boxes = (torch.cat(files.boxes).double() * scale).clamp(0, image_size)
    is_empty = (boxes[:, 2:] <= boxes[:, :2]).any(dim=1)
    if is_empty.any():
        i = int(is_empty.nonzero()[0])
        width, height = (int(v) for v in sizes[i])
        raise ValueError(
            f"{files.paths[i]}: its box {files.boxes[i][0].tolist()} lies outside its "
            f"{width} x {height} pixels; unpack the archive again"
        )
    return boxes.float().unsqueeze(1).unbind()


def _find(root: Path | str | None) -> Path:
    place = data_root(root)  # it may be the folder itself, under any name
    return find_folder("cub200", (place, place / "CUB_200_2011"), ("images.txt",), BY_HAND)


register_dataset(
    "cub200",
    description="CUB-200-2011: birds, 5,994 train and 5,794 test images with boxes, squashed to "
    "224 x 224; to be unpacked by hand",
    image_size=224,
    num_classes=CUB.num_classes,
    check=check_cub,
    find=_find,
    scan=scan_cub,
    by_hand=BY_HAND,
)(load_cub)
