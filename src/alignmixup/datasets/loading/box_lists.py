"""Boxes of images from a list beside them, in the two formats that exist for ImageNet.

    localization.txt        <file>,<x0>,<y0>,<x1>,<y1>                       one line per box
    LOC_val_solution.csv    <name>,<class> <x0> <y0> <x1> <y1> <class> ...   one line per image

The first is the format of the localization benchmark of Choe et al. 2020, the second that of the
ImageNet localization challenge. A file is named by its path from the folder of the list or of its
split, or by its last part, with or without suffix. Corners are in pixels of the image, counted from
0, the last pixel included; our boxes have exclusive ends, hence one more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from alignmixup.datasets.loading.decode import open_image
from alignmixup.datasets.loading.layout import read_lines

Box = tuple[float, float, float, float]
_FORMS = {
    "localization.txt": "FILE,x0,y0,x1,y1",
    "LOC_val_solution.csv": "NAME,CLASS x0 y0 x1 y1 CLASS x0 y0 x1 y1 ...",
}
LISTS = tuple(_FORMS)


@dataclass(frozen=True)
class BoxList:
    """The boxes of each file by its name in the list at ``path``."""

    path: Path
    boxes: Mapping[str, Sequence[Box]]

    def of(self, file: str) -> Sequence[Box]:
        """Return the boxes of a file; none if it is not in the list."""
        return self.boxes.get(self.name_of(file) or "", ())

    def name_of(self, file: str) -> str | None:
        """Return the name that the list has for a file; None if it is not in the list."""
        inside = os.path.relpath(file, self.path.parent).replace(os.sep, "/")
        split, _, rest = inside.partition("/")
        last = os.path.basename(file)
        # The path, the path without its split, with its split but without its class (as in the
        # benchmark's list of ImageNet), the last part, and the last part without its suffix.
        names = (inside, rest, f"{split}/{last}", last, Path(file).stem)
        return next((name for name in names if name in self.boxes), None)


def find_box_list(root: Path) -> BoxList | None:
    """Read the first of ``LISTS`` that is in ``root``; None if there is none."""
    for name in LISTS:
        path = root / name
        if path.is_file():
            return _read(path)
    return None


def _read(path: Path) -> BoxList:
    parse = _benchmark if path.name == LISTS[0] else _challenge
    boxes: dict[str, list[Box]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip() or line.startswith("ImageId"):
            continue
        try:
            for name, box in parse(line):
                boxes.setdefault(name, []).append(_checked(box))
        except ValueError:
            raise ValueError(
                f"{path}: cannot read line {number}, {line!r}; a line reads {_FORMS[path.name]}"
            ) from None
    if not boxes:
        raise ValueError(f"{path} has no box; a line reads {_FORMS[path.name]}")
    return BoxList(path, boxes)


def _benchmark(line: str) -> Iterator[tuple[str, Box]]:
    name, x0, y0, x1, y1 = line.rsplit(",", 4)
    yield name.strip(), (float(x0), float(y0), float(x1), float(y1))


def _challenge(line: str) -> Iterator[tuple[str, Box]]:
    name, _, rest = line.partition(",")
    words = rest.split()
    if not words or len(words) % 5:
        raise ValueError
    for start in range(0, len(words), 5):
        x0, y0, x1, y1 = (float(word) for word in words[start + 1 : start + 5])
        yield name.strip(), (x0, y0, x1, y1)


def _checked(box: Box) -> Box:
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)) or x1 < x0 or y1 < y0:
        raise ValueError
    return x0, y0, x1 + 1, y1 + 1


def listed_boxes(listed: BoxList, paths: Sequence[str]) -> tuple[Float[Tensor, "k 4"], ...]:
    """Return the boxes of each file, in pixels of its image; raise if no file is in the list.

    A file that is not in the list has none. A name that stands for two files, the last part of
    both, raises as well.
    """
    file_of: dict[str, str] = {}
    for path in paths:
        name = listed.name_of(path)
        if name is not None and file_of.setdefault(name, path) != path:
            raise ValueError(
                f"{listed.path}: {name!r} stands for {file_of[name]} and for {path}: write their "
                f"paths from {listed.path.parent}"
            )
    found = [listed.of(path) for path in paths]
    if not any(found):
        raise ValueError(
            f"{listed.path} names none of the {len(paths)} images: it begins with "
            f"{next(iter(listed.boxes))!r}, they with {paths[0]!r}"
        )
    return tuple(torch.tensor(boxes, dtype=torch.float32).view(-1, 4) for boxes in found)


def boxes_in_view(
    boxes: Sequence[Float[Tensor, "k 4"]],
    paths: Sequence[str],
    image_size: int,
    fraction: float = 1.0,
    *,
    squash: bool = False,
) -> tuple[Float[Tensor, "k 4"], ...]:
    """Return the boxes of files in the part of their images that evaluation shows, clipped to it.

    That part is the centered square of ``fraction`` of the shorter side or, with ``squash``, the
    central ``fraction`` of both sides, resized to ``image_size``. A box outside of it is left out.
    """
    pairs = zip(boxes, paths, strict=True)
    return tuple(_in_view(of_file, path, image_size, fraction, squash) for of_file, path in pairs)


def _in_view(
    boxes: Tensor, path: str, image_size: int, fraction: float, squash: bool
) -> Float[Tensor, "k 4"]:
    if not len(boxes):
        return boxes
    with open_image(path) as image:  # reads only the size
        whole = torch.tensor(image.size, dtype=torch.float64)
    window = fraction * (whole if squash else whole.min().expand(2))
    inside = (boxes.double() - ((whole - window) / 2).repeat(2)) / window.repeat(2)
    inside = (image_size * inside).clamp(0, image_size)
    return inside[(inside[:, 2:] > inside[:, :2]).all(dim=1)].float()
