"""Tiny-ImageNet-200 from its official folder: 64 x 64 JPEGs, 200 classes, one box per image.

    train/<wnid>/images/<wnid>_<i>.JPEG, boxes in train/<wnid>/<wnid>_boxes.txt
    val/images/val_<i>.JPEG, class and box in val/val_annotations.txt

The labels of the official test images were never published, so the official ``val`` is our ``test``
split, as in the papers. Class k is the k-th of the **sorted** wnids (wnids.txt has another order),
as for readers of class folders. About 2 % of the files are gray.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import check_splits
from alignmixup.datasets.loading.decode import decode_files
from alignmixup.datasets.loading.download import Archive
from alignmixup.datasets.loading.layout import (
    PROTOCOL_MEAN,
    PROTOCOL_STD,
    check_split,
    data_root,
    find_folder,
    read_lines,
)
from alignmixup.registry import register_dataset

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TinyLayout:
    """The expected number of images and classes."""

    num_classes: int = 200
    train_per_class: int = 500
    num_val: int = 10_000
    image_size: int = 64


TINY = TinyLayout()


def load_tiny(root: Path | str | None, split: str, layout: TinyLayout = TINY) -> ImageSet:
    """Read one split; the decoded images are cached beside the data."""
    check_split(split)
    folder = _find(root)
    wnids = _wnids(folder, layout)
    listing = _LISTINGS[split](folder, wnids, layout)
    boxes = torch.tensor([row.box for row in listing], dtype=torch.float32)
    return ImageSet(
        name="tiny",
        split=split,
        images=_decode_or_recall(folder, split, [row.path for row in listing], layout.image_size),
        labels=torch.tensor([row.label for row in listing]),
        class_names=_class_names(folder, wnids),
        mean=PROTOCOL_MEAN,
        std=PROTOCOL_STD,
        boxes=boxes.unsqueeze(1).unbind(),
    )


def list_tiny_val(root: Path | str | None, layout: TinyLayout = TINY) -> tuple[Path, list[str]]:
    """Return the folder that contains ``val``, and its image files; nothing else is needed."""
    folder = _find(root, "val/images")
    images = folder / "val" / "images"
    # By number, the order of val_annotations.txt, so that the cache is shared.
    names = sorted((e.name for e in os.scandir(images) if e.name.endswith(".JPEG")), key=_number)
    if len(names) != layout.num_val:
        raise ValueError(
            f"{images} is damaged: {len(names)} images, not {layout.num_val}; run 'alignmixup data "
            "fetch tiny'"
        )
    return folder, [f"{images}{os.sep}{name}" for name in names]


def _number(name: str) -> tuple[int, str]:
    digits = "".join(c for c in name if c.isdigit())
    return int(digits or 0), name


def load_tiny_val(root: Path | str | None, layout: TinyLayout = TINY) -> UInt8[Tensor, "n 3 s s"]:
    """Return the images of the official ``val`` without reading classes or labels."""
    folder, paths = list_tiny_val(root, layout)
    return _decode_or_recall(folder, "test", paths, layout.image_size)


def check_tiny(root: Path | str | None, layout: TinyLayout = TINY) -> list[str]:
    """Decode every image and return one line for each thing that is missing or damaged."""

    def paths_of(split: str) -> list[str]:
        folder = _find(root)
        listing = _LISTINGS[split](folder, _wnids(folder, layout), layout)
        return [row.path for row in listing]

    return check_splits(paths_of)


@dataclass(frozen=True, slots=True)
class _Row:
    path: str
    label: int
    box: tuple[int, int, int, int]


def _find(root: Path | str | None, holds: str = "wnids.txt") -> Path:
    place = data_root(root)  # it may be the folder itself, under any name
    return find_folder("tiny", (place, place / "tiny-imagenet-200"), (holds,))


def _wnids(folder: Path, layout: TinyLayout) -> list[str]:
    wnids = sorted(_lines(folder / "wnids.txt"))
    if not len(wnids) == len(set(wnids)) == layout.num_classes:
        raise ValueError(
            f"{folder / 'wnids.txt'} is damaged: {len(wnids)} lines with {len(set(wnids))} "
            f"classes, not {layout.num_classes}; run 'alignmixup data fetch tiny'"
        )
    return wnids


def _train_listing(folder: Path, wnids: Sequence[str], layout: TinyLayout) -> list[_Row]:
    rows = []
    for label, wnid in enumerate(wnids):
        boxes_file = folder / "train" / wnid / f"{wnid}_boxes.txt"
        images = f"{folder / 'train' / wnid / 'images'}{os.sep}"
        lines = _lines(boxes_file)
        _expect_count(boxes_file, len(lines), layout.train_per_class)
        for line in lines:
            name, box = _parse(boxes_file, line, num_columns=5)
            rows.append(_Row(images + name[0], label, box))
    return rows


def _val_listing(folder: Path, wnids: Sequence[str], layout: TinyLayout) -> list[_Row]:
    annotations = folder / "val" / "val_annotations.txt"
    images = f"{folder / 'val' / 'images'}{os.sep}"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    lines = _lines(annotations)
    _expect_count(annotations, len(lines), layout.num_val)
    rows = []
    for line in lines:
        (name, wnid), box = _parse(annotations, line, num_columns=6)
        if wnid not in label_of:
            raise ValueError(f"{annotations} is damaged: class {wnid!r} is not in wnids.txt")
        rows.append(_Row(images + name, label_of[wnid], box))
    return rows


_LISTINGS = {"train": _train_listing, "test": _val_listing}


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run 'alignmixup data fetch tiny' to get it")
    return read_lines(path)


def _expect_count(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{path} is damaged: {found} lines, not {expected}; fetch again")


def _parse(path: Path, line: str, num_columns: int) -> tuple[list[str], tuple[int, int, int, int]]:
    """Split a line into words and box; the file's last corner is inclusive, ours exclusive."""
    columns = line.split("\t")
    try:
        x0, y0, x1, y1 = (int(word) for word in columns[-4:])
    except ValueError:
        columns = []
    if len(columns) != num_columns:
        raise ValueError(f"{path} is damaged: cannot read the line {line!r}; fetch again")
    return columns[:-4], (x0, y0, x1 + 1, y1 + 1)


def _class_names(folder: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Return the first synonym of each class in words.txt, or the wnid if it has none."""
    path = folder / "words.txt"
    words: dict[str, str] = {}
    if path.is_file():
        words = dict(line.split("\t", 1) for line in _lines(path) if "\t" in line)
    return tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)


def _decode_or_recall(
    folder: Path, split: str, paths: Sequence[str], image_size: int
) -> UInt8[Tensor, "n 3 s s"]:
    """Decode the images, or read them from the cache of the same files."""
    cache = folder / f"decoded-{split}.safetensors"
    fingerprint = _fingerprint(folder, paths, image_size)
    images = _recall(cache, fingerprint)
    if images is None:
        images = decode_files(paths, image_size)
        _keep(cache, fingerprint, images)
    return images


def _fingerprint(folder: Path, paths: Sequence[str], image_size: int) -> str:
    """Return a hash of every file's name, size and modification time."""
    digest = hashlib.blake2b(f"{image_size}".encode(), digest_size=16)
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} is missing; run 'alignmixup data fetch tiny' to get it"
            ) from None
        name = path.removeprefix(str(folder))
        digest.update(f"{name}\t{status.st_size}\t{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _recall(cache: Path, fingerprint: str) -> UInt8[Tensor, "n 3 s s"] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(cache, framework="pt") as file:
            if (file.metadata() or {}).get("fingerprint") == fingerprint:
                images: Tensor = file.get_tensor("images")
                return images
    except (OSError, SafetensorError):
        pass  # a missing or damaged cache: decode again
    return None


def _keep(cache: Path, fingerprint: str, images: UInt8[Tensor, "n 3 s s"]) -> None:
    """Write the cache atomically; warn if the folder is not writable."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    try:
        save_file({"images": images}, part, metadata={"fingerprint": fingerprint})
        part.chmod(0o644)  # safetensors makes it private; data folders are shared
        os.replace(part, cache)
    except (OSError, SafetensorError) as error:
        log.warning("could not cache the decoded images in %s: %s", cache, error)
        part.unlink(missing_ok=True)


register_dataset(
    "tiny",
    description="Tiny-ImageNet-200: 100,000 train images and the 10,000 of its official val as "
    "test, 64 x 64, with boxes",
    image_size=TINY.image_size,
    num_classes=TINY.num_classes,
    check=check_tiny,
    find=_find,
    archive=Archive(
        url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        checksum="sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        folder="tiny-imagenet-200",
    ),
)(load_tiny)
