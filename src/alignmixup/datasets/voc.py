"""Images with many boxes each, for detection: the layouts of PASCAL VOC and of COCO.

    VOC2007/ImageSets/Main/trainval.txt   one name per line
            Annotations/<name>.xml        class, corners (1-based, the last pixel included), flags
            JPEGImages/<name>.jpg
    annotations/instances_train2017.json  images, categories, annotations (x, y, width, height)
    train2017/<file_name>

Boxes are (x0, y0, x1, y1) in pixels, ends exclusive; labels count from 0 in the order of
``class_names``. VOC's "difficult" and COCO's "iscrowd" boxes are kept and marked ``is_ignored``:
they are not trained on, and an evaluation counts them neither as right nor as wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from alignmixup.datasets.loading.decode import read_rgb
from alignmixup.datasets.loading.layout import data_root, find_folder, read_lines

FLAG = "--root"  # of alignmixup detect, whose --data chooses VOC or COCO

# In the order of the development kit, which is alphabetical.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


@dataclass(frozen=True)
class DetectionExample:
    """One image with its objects; ``areas`` are COCO's own (of the segment), else of the box."""

    image_id: int
    image: UInt8[Tensor, "3 h w"]
    boxes: Float[Tensor, "k 4"]
    labels: Int64[Tensor, " k"]
    is_ignored: Bool[Tensor, " k"]
    areas: Float[Tensor, " k"]


@dataclass(frozen=True, slots=True)
class _Annotated:
    """An image before it is decoded: its path, id, size and objects."""

    path: str
    image_id: int
    size: tuple[int, int]
    objects: tuple[_Object, ...]


@dataclass(frozen=True, slots=True)
class _Object:
    label: int
    box: tuple[float, float, float, float]
    is_ignored: bool
    area: float


@dataclass(frozen=True)
class DetectionSet:
    """A set of annotated images; indexing decodes one."""

    name: str
    split: str
    class_names: tuple[str, ...]
    rows: tuple[_Annotated, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def is_trainable(self, index: int) -> bool:
        """Return whether the image has an object that is not ignored, without decoding it."""
        return any(not found.is_ignored for found in self.rows[index].objects)

    def first(self, count: int | None) -> DetectionSet:
        """Return the first ``count`` images; None for all."""
        return replace(self, rows=self.rows[:count])

    def __getitem__(self, index: int) -> DetectionExample:
        row = self.rows[index]
        pixels = np.array(read_rgb(row.path))
        if pixels.shape[:2] != row.size[::-1]:
            raise ValueError(
                f"{row.path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, but its annotation "
                f"has {row.size[0]} x {row.size[1]}: one of them is not the official file"
            )
        return DetectionExample(
            image_id=row.image_id,
            image=torch.from_numpy(pixels).permute(2, 0, 1).contiguous(),
            boxes=torch.tensor([o.box for o in row.objects]).view(-1, 4),
            labels=torch.tensor([o.label for o in row.objects], dtype=torch.int64),
            is_ignored=torch.tensor([o.is_ignored for o in row.objects], dtype=torch.bool),
            areas=torch.tensor([o.area for o in row.objects]),
        )


def concatenate(first: DetectionSet, *others: DetectionSet) -> DetectionSet:
    """Return one set of several with the same classes, e.g. VOC 2007 and 2012, renumbered."""
    rows = list(first.rows)
    for other in others:
        if other.class_names != first.class_names:
            raise ValueError(f"{first.name} and {other.name} have different classes")
        rows += other.rows
    numbered = tuple(replace(row, image_id=i) for i, row in enumerate(rows))
    name = "+".join(s.name for s in (first, *others))
    return replace(first, name=name, rows=numbered)


def voc_splits(
    root: Path | str | None, years: Sequence[int] = (2007, 2012)
) -> tuple[DetectionSet, DetectionSet]:
    """Return the trainval images of ``years`` as one set, and the test images of 2007."""
    if not years:
        raise ValueError("years must not be empty: choose 2007, 2012 or both")
    return concatenate(*[scan_voc(root, "trainval", y) for y in years]), scan_voc(root, "test")


def coco_splits(root: Path | str | None) -> tuple[DetectionSet, DetectionSet]:
    """Return train2017 and val2017 of the COCO folder, which is ``root`` or ``root/coco``."""
    place = data_root(root)
    remedy = "unpack the official archives there"
    folder = find_folder("COCO", (place / "coco", place), ("annotations",), remedy, FLAG)
    train, val = (
        scan_coco(folder / "annotations" / f"instances_{split}.json", folder / split)
        for split in ("train2017", "val2017")
    )
    return train, val


def scan_voc(
    root: Path | str | None,
    split: str = "trainval",
    year: int = 2007,
    class_names: Sequence[str] = VOC_CLASSES,
) -> DetectionSet:
    """Read the annotations of ImageSets/Main/<split>.txt; no image is decoded."""
    folder = _voc_folder(root, year)
    listing = folder / "ImageSets" / "Main" / f"{split}.txt"
    if not listing.is_file():
        there = sorted(p.stem for p in listing.parent.glob("*.txt") if "_" not in p.stem)
        raise FileNotFoundError(f"{listing} is missing; there are the splits {', '.join(there)}")
    # Lists of one class have a second column; the first is always the name.
    names = [line.split()[0] for line in read_lines(listing) if line.strip()]
    if not names:
        raise ValueError(f"{listing} is empty: unpack the archive again")
    label_of = {name: label for label, name in enumerate(class_names)}
    rows = tuple(_read_voc(folder, name, number, label_of) for number, name in enumerate(names))
    return DetectionSet(f"voc{year}", split, tuple(class_names), rows)


def _voc_folder(root: Path | str | None, year: int) -> Path:
    place = data_root(root)
    tried = [place / "VOCdevkit" / f"VOC{year}", place / f"VOC{year}"]
    if not re.fullmatch(r"VOC\d{4}", place.name) or place.name == f"VOC{year}":
        tried.append(place)  # unless it is another year's
    remedy = "unpack the development kit there"
    return find_folder(f"VOC {year}", tried, ("ImageSets/Main",), remedy, FLAG)


def _read_voc(folder: Path, name: str, number: int, label_of: dict[str, int]) -> _Annotated:
    path = folder / "Annotations" / f"{name}.xml"
    image = folder / "JPEGImages" / f"{name}.jpg"
    for file in (path, image):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing")
    root = _parse_xml(path)
    try:
        size = (int(_text(root, "size/width")), int(_text(root, "size/height")))
        objects = tuple(_voc_object(o, label_of, size) for o in root.iter("object"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return _Annotated(str(image), number, size, objects)


def _parse_xml(path: Path) -> ElementTree.Element:
    """Parse a plain document; raise for one that declares entities."""
    content = path.read_bytes()
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise ValueError(
            f"{path} is unsafe: it declares a document type; VOC annotations have none"
        )
    try:
        return ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is damaged ({error}): unpack the archive again") from None


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext(name)
    if found is None:
        raise ValueError(f"it has no {name}")
    return found.strip()


def _voc_object(
    element: ElementTree.Element, label_of: dict[str, int], size: tuple[int, int]
) -> _Object:
    name = _text(element, "name")
    if name not in label_of:
        raise ValueError(f"unknown class {name!r}; known are {', '.join(label_of)}")
    corners = [float(_text(element, f"bndbox/{c}")) for c in ("xmin", "ymin", "xmax", "ymax")]
    # VOC counts from 1 and includes xmax.
    x0, y0, x1, y1 = corners[0] - 1, corners[1] - 1, corners[2], corners[3]
    if not (0 <= x0 < x1 <= size[0] and 0 <= y0 < y1 <= size[1]):
        raise ValueError(f"the box {corners} is not inside its {size[0]} x {size[1]} pixels")
    is_difficult = (element.findtext("difficult") or "0").strip() == "1"
    return _Object(label_of[name], (x0, y0, x1, y1), is_difficult, (x1 - x0) * (y1 - y0))


def scan_coco(annotations: Path | str, images: Path | str) -> DetectionSet:
    """Read a file of instances; ``images`` is the folder of its files. No image is decoded.

    Classes are the categories in the order of their ids. Boxes are clipped to the
    image; those without an area, of which COCO has a few, are left out.
    """
    path, folder = Path(annotations).expanduser(), Path(images).expanduser()
    document = _read_json(path)
    try:
        for kind in ("categories", "images"):
            _check_ids(kind, [int(row["id"]) for row in document[kind]])
        categories = sorted(document["categories"], key=lambda c: int(c["id"]))
        label_of = {int(c["id"]): label for label, c in enumerate(categories)}
        objects: dict[int, list[_Object]] = {int(i["id"]): [] for i in document["images"]}
        sizes = {int(i["id"]): (int(i["width"]), int(i["height"])) for i in document["images"]}
        for row in document["annotations"]:
            found = _coco_object(row, label_of, sizes[int(row["image_id"])])
            if found is not None:
                objects[int(row["image_id"])].append(found)
        rows = tuple(
            _Annotated(
                os.path.join(folder, i["file_name"]),
                int(i["id"]),
                sizes[int(i["id"])],
                tuple(objects[int(i["id"])]),
            )
            for i in document["images"]
        )
        class_names = tuple(str(c["name"]) for c in categories)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of COCO instances: {error!r}") from None
    missing = next((row.path for row in rows if not os.path.isfile(row.path)), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} of {path} is missing: unpack the archive again")
    return DetectionSet("coco", path.stem, class_names, rows)


def _check_ids(kind: str, ids: Sequence[int]) -> None:
    """Raise where two have one id, as in files that were merged: boxes would be of either."""
    twice = [number for number, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"two of its {kind} have the id {twice[0]}")


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): unpack the archive again") from None


def _coco_object(
    row: dict[str, Any], label_of: dict[int, int], size: tuple[int, int]
) -> _Object | None:
    x, y, width, height = (float(v) for v in row["bbox"])
    if not all(map(math.isfinite, (x, y, width, height))):
        raise ValueError(f"the box of annotation {row.get('id')} must be finite, got {row['bbox']}")
    x0, y0 = max(x, 0.0), max(y, 0.0)
    x1, y1 = min(x + width, float(size[0])), min(y + height, float(size[1]))
    if not (x1 > x0 and y1 > y0):
        return None
    area = float(row.get("area", width * height))
    return _Object(
        label_of[int(row["category_id"])], (x0, y0, x1, y1), bool(row.get("iscrowd", 0)), area
    )
