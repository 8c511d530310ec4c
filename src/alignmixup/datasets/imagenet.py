"""ImageNet-1k (ILSVRC 2012) from its official images, one folder per class.

    imagenet/train/<wnid>/*.JPEG     1,000 folders, 1,281,167 images
    imagenet/val/<wnid>/*.JPEG       the same 1,000 folders, 50 images each

The archives need an account and its terms, so no program can download them. The official ``val``
archive is flat; its images must be sorted into folders. The training images do not fit in memory
and are streamed; those of ``val`` take 7.5 GB. Their boxes are read from a list beside the two
folders, if there is one (see ``box_lists``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet, decode_set, scan_folder
from alignmixup.datasets.loading.decode import unreadable_files
from alignmixup.datasets.loading.layout import SPLITS, check_split, data_root, find_folder
from alignmixup.datasets.loading.view import CENTER_FRACTION
from alignmixup.registry import register_dataset

FOLDERS = ("imagenet", "ILSVRC2012")
IMAGE_SIZE = 224

BY_HAND = (
    "its archives need an account at image-net.org and its terms; unpack "
    "ILSVRC2012_img_train.tar and the 1,000 archives in it to imagenet/train/WNID/*.JPEG, and sort "
    "the images of ILSVRC2012_img_val.tar to imagenet/val/WNID/*.JPEG"
)


@dataclass(frozen=True)
class ImageNetLayout:
    """The expected number of images and classes."""

    num_classes: int = 1000
    num_train: int = 1_281_167
    num_val: int = 50_000

    def num_images(self, split: str) -> int:
        return self.num_train if split == "train" else self.num_val


IMAGENET = ImageNetLayout()


def scan_imagenet(
    root: Path | str | None, split: str, layout: ImageNetLayout = IMAGENET
) -> FileSet:
    """List the files of one split, ``test`` is the official ``val``; nothing is decoded."""
    check_split(split)
    folder = _find(root)
    files = scan_folder(folder, split)
    here = folder / ("train" if split == "train" else "val")
    strange = [name for name in files.class_names if not re.fullmatch(r"n\d{8}", name)]
    if strange:
        raise ValueError(f"{here / strange[0]} is not named after a WordNet id such as n01440764")
    if len(files.class_names) != layout.num_classes:
        raise ValueError(
            f"{folder / 'train'} has {len(files.class_names)} class folders, not "
            f"{layout.num_classes}: {BY_HAND}"
        )
    if len(files) != layout.num_images(split):
        raise ValueError(
            f"{here} has {len(files)} images, not {layout.num_images(split)}: unpack it again"
        )
    return replace(files, name="imagenet")


def load_imagenet(
    root: Path | str | None, split: str, layout: ImageNetLayout = IMAGENET
) -> ImageSet:
    """Decode ``val`` into memory, 224 x 224 from the center of 256, as it is evaluated."""
    check_split(split)
    if split == "train":
        raise ValueError(
            "imagenet: the 1,281,167 training images do not fit in memory; list them with "
            "scan_imagenet and stream them with StreamLoader, as the recipes do"
        )
    return decode_set(scan_imagenet(root, split, layout), IMAGE_SIZE, CENTER_FRACTION)


def check_imagenet(root: Path | str | None, layout: ImageNetLayout = IMAGENET) -> list[str]:
    """Return one line for each problem; decode every image if none is missing."""
    problems: list[str] = []
    paths: list[str] = []
    for split in SPLITS:
        try:
            paths += scan_imagenet(root, split, layout).paths
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems)) or unreadable_files(paths)


def _find(root: Path | str | None) -> Path:
    place = data_root(root)
    tried = (place / FOLDERS[0], place / FOLDERS[1], place)
    return find_folder("imagenet", tried, ("train", "val"), f"no program can fetch it: {BY_HAND}")


register_dataset(
    "imagenet",
    description="ImageNet-1k: 1,281,167 train images and the 50,000 of its official val as test, "
    "streamed from their files; to be unpacked by hand",
    image_size=IMAGE_SIZE,
    num_classes=IMAGENET.num_classes,
    check=check_imagenet,
    find=_find,
    scan=scan_imagenet,
    by_hand=BY_HAND,
)(load_imagenet)
