"""Images in tar files (shards), in the format of WebDataset: few large files instead of millions.

    OUT/train-000000.tar   00000017.jpg, 00000017.cls (the label), 00000018.jpg, ...
    OUT/train-000000.json  where each image is in it, its label and its CRC-32
    OUT/val-000000.tar     the test split
    OUT/dataset.json       class names, image size, normalization, numbers of shards; written last

``write_shards`` writes them, the training images in random order, each as the bytes of its file.
Shards of others need no JSON: their tar headers are read, and classes are named by their numbers.
"""

from __future__ import annotations

import glob
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet, check_splits, decode_set
from alignmixup.datasets.loading.decode import IMAGE_SUFFIXES
from alignmixup.datasets.loading.layout import SPLITS, check_split, path_and_size
from alignmixup.datasets.loading.members import UNKNOWN, Member, checksum
from alignmixup.files import make_folder, replacing, write_text
from alignmixup.registry import DatasetEntry

ABOUT = "dataset.json"
SHARDS_SIZE = 224
IMAGES_PER_SHARD = 2000
MAX_CLASSES = 2**20
PREFIXES = {"train": ("train",), "test": ("val", "test")}

# A row of an index: name, offset, size, label, CRC-32.
_Row = tuple[str, int, int, int, str]


def write_shards(
    source: DatasetEntry,
    out: Path | str,
    root: Path | None = None,
    *,
    images_per_shard: int = IMAGES_PER_SHARD,
    on_shard: Callable[[Path], None] | None = None,
) -> Path:
    """Write both splits of a data set as shards into the folder ``out``; return the folder.

    Files are copied as they are; images that a data set has in no files become PNG. Boxes are not
    written.

    Raises:
        ValueError: The folder has shards already, if only those of a write that was interrupted.
    """
    if images_per_shard < 1:
        raise ValueError(f"images_per_shard must be at least 1, got {images_per_shard}")
    out = Path(out)
    make_folder(out)
    if (out / ABOUT).exists():
        raise ValueError(f"{out} has the shards of a data set already; choose another folder")
    if old := [path for split in SPLITS for path in _matches(str(out), split)]:
        raise ValueError(
            f"{min(old)} exists already: delete the shards of a write that was interrupted, or "
            "choose another folder"
        )
    num_shards = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        images = (source.scan or source.function)(root, split)
        order = torch.arange(len(images))
        if split == "train":  # files are listed by class, and a window of shards needs all of them
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        for number, rows in enumerate(torch.split(order, images_per_shard)):
            shard = out / _name(split, number)
            _write_shard(shard, images, rows.tolist())
            num_shards[split] += 1
            if on_shard is not None:
                on_shard(shard)
    about = {
        "name": images.name,
        "class_names": images.class_names,
        "image_size": source.image_size,
        "mean": images.mean,
        "std": images.std,
        "num_shards": num_shards,
    }
    write_text(out / ABOUT, json.dumps(about, indent=2))
    return out


def scan_shards(pattern: str, split: str) -> FileSet:
    """List the images of one split; nothing is decoded.

    ``pattern`` is a folder of ``train-*.tar`` and ``val-*.tar`` (or ``test-*.tar``), or a path with
    ``{split}`` in it, which stands for these words: ``/data/pets-{split}-*.tar``.
    """
    check_split(split)
    about = _about(pattern)
    shards = sorted({*_find(pattern, split), *_listed(pattern, split, about)})
    rows = [(shard, row) for shard in shards for row in _index(shard)]
    if not rows:
        raise ValueError(f"{shards[0]} has no image (KEY.jpg, with its label in KEY.cls)")
    labels = torch.tensor([row[3] for _, row in rows])
    names: list[str] | None = about.get("class_names")
    if names is None:
        train = labels if split == "train" else scan_shards(pattern, "train").labels
        names = [str(label) for label in range(int(train.max()) + 1)]
    _check_labels(rows, labels, len(names))
    return FileSet(
        name=Path(pattern).name,
        split=split,
        paths=tuple(Member(shard, row[0], row[1], row[2], row[4]).path for shard, row in rows),
        labels=labels,
        class_names=tuple(names),
        **{key: about[key] for key in ("mean", "std") if key in about},
    )


def shards_entry(name: str) -> DatasetEntry:
    """Return the data set ``shards:PATTERN`` or ``shards:PATTERN@SIZE``."""
    path, given_size = path_and_size(name, "shards:")
    pattern = str(path.expanduser())
    size = given_size
    if size is None:
        size = int(_about(pattern).get("image_size", SHARDS_SIZE))
    return DatasetEntry(
        name=name,
        function=lambda _root, split: decode_set(scan_shards(pattern, split), size),
        description=f"images in the tar files {pattern}, in the format of WebDataset",
        image_size=size,
        check=lambda _root: check_splits(lambda split: scan_shards(pattern, split).paths),
        scan=lambda _root, split: scan_shards(pattern, split),
    )


def _write_shard(shard: Path, images: ImageSet | FileSet, rows: Sequence[int]) -> None:
    index: list[_Row] = []
    with (
        replacing(shard) as partial,
        tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for row in rows:
            suffix, data = _bytes_of(images, row)
            label, key = int(images.labels[row]), f"{row:08}"
            offset = _add(tar, key + suffix, data)
            _add(tar, key + ".cls", str(label).encode())
            index.append((key + suffix, offset, len(data), label, checksum(data)))
    write_text(_index_path(shard), json.dumps({"crc": _crc(index), "members": index}))


def _bytes_of(images: ImageSet | FileSet, row: int) -> tuple[str, bytes]:
    """An image as a file: its suffix and its bytes."""
    from PIL import Image

    if isinstance(images, FileSet):
        path = images.paths[row]
        member = Member.of(path)
        data = Path(path).read_bytes() if member is None else member.read()
        suffix = os.path.splitext(path if member is None else member.name)[1].lower()
        return ".jpg" if suffix == ".jpeg" else suffix, data
    buffer = io.BytesIO()
    Image.fromarray(images.images[row].permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return ".png", buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a member; return the offset of its bytes. The same images make the same shard."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
    return int(tar.offset) - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _name(split: str, number: int) -> str:
    return f"{PREFIXES[split][0]}-{number:06}.tar"


def _find(pattern: str, split: str) -> list[str]:
    if not os.path.isdir(pattern) and "{split}" not in pattern:
        raise ValueError(
            f"{pattern} is no folder and has no {{split}} in it: write shards:FOLDER, or "
            "shards:PATH-{split}-*.tar, where {split} stands for train and val"
        )
    if found := _matches(pattern, split):
        return found
    tried = " or ".join(os.path.join(*place) for place in _places(pattern, split))
    raise FileNotFoundError(f"no file matches {tried}; check the path of the shards")


def _matches(pattern: str, split: str) -> list[str]:
    """The files of a split, with the first of its prefixes that any have."""
    for folder, name in _places(pattern, split):
        if found := glob.glob(name, root_dir=folder or None):
            return [os.path.join(folder, each) for each in found]
    return []


def _places(pattern: str, split: str) -> list[tuple[str, str]]:
    """The folder, which may have any name, and the pattern for each prefix of a split."""
    is_folder = os.path.isdir(pattern)
    folder, name = (pattern, "{split}-*.tar") if is_folder else ("", pattern)
    return [(folder, name.replace("{split}", prefix)) for prefix in PREFIXES[split]]


def _listed(pattern: str, split: str, about: Mapping[str, Any]) -> Iterator[str]:
    """The shards that a folder was written with: one that is missing is named where it is read."""
    number = about.get("num_shards", {}).get(split, 0) if os.path.isdir(pattern) else 0
    for shard in (os.path.join(pattern, _name(split, i)) for i in range(number)):
        if not os.path.exists(shard) and not _index_path(Path(shard)).exists():
            raise FileNotFoundError(f"{shard} is missing, which {ABOUT} counts: copy it again")
        yield shard


def _index(shard: str) -> list[_Row]:
    """The images of a shard, from its JSON or else from its headers."""
    path = _index_path(Path(shard))
    if not path.exists():
        return list(_read_headers(shard))
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["crc"] != _crc(index["members"]):
            raise ValueError("its checksum differs")
        rows = [
            (str(name), int(offset), int(size), int(label), str(crc))
            for name, offset, size, label, crc in index["members"]
        ]
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and the shard is listed without it"
        ) from None
    if os.path.exists(shard) and os.path.getsize(shard) > _length(rows):
        raise ValueError(
            f"{shard} has grown since {path} was written: delete that file, and the shard is "
            "listed without it"
        )
    return rows


def _length(rows: Sequence[_Row]) -> int:
    """The bytes of a shard as we write it: its label and two empty blocks follow the last image."""
    end = max((offset + size for _, offset, size, _, _ in rows), default=0)
    blocks = -(-end // tarfile.BLOCKSIZE) + 4
    return -(-blocks * tarfile.BLOCKSIZE // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def _read_headers(shard: str) -> Iterator[_Row]:
    """Pairs KEY.jpg and KEY.cls, in whatever order; the key ends at the first dot of the name."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                folder, _, base = info.name.rpartition("/")
                key, suffix = f"{folder}/{base.partition('.')[0]}", base.partition(".")[2].lower()
                if suffix == "cls":
                    labels[key] = _label(tar, info)
                elif f".{suffix}" in IMAGE_SUFFIXES and not info.isdir():
                    _check_image(info, images.get(key))
                    images[key] = info
            # tarfile takes a damaged header for the end, where there is nothing but zeros.
            with open(shard, "rb") as end:
                end.seek(tar.offset)
                rest = end.read(2**20)
            if not rest or rest.strip(b"\0"):
                raise ValueError(f"no header and no end at byte {tar.offset}")
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise ValueError(f"{shard} cannot be read as a shard ({error}): write it again") from None
    for key, info in images.items():
        if key not in labels:
            raise ValueError(f"{shard}: {info.name} has no label: add {key.lstrip('/')}.cls")
        yield info.name, info.offset_data, info.size, labels[key], UNKNOWN


def _label(tar: tarfile.TarFile, info: tarfile.TarInfo) -> int:
    file = tar.extractfile(info)
    text = file.read() if file else b""
    try:
        label = int(text)
    except ValueError:
        label = -1
    if not 0 <= label < MAX_CLASSES:  # an id in its place would be as many classes
        raise ValueError(
            f"{info.name} must hold the number of a class, counted from 0; got {text[:40]!r}"
        )
    return label


def _check_image(info: tarfile.TarInfo, other: tarfile.TarInfo | None) -> None:
    """Raise for an image that is not at one place in the shard, or that is not alone."""
    if other is not None:
        raise ValueError(f"one key has two images, {other.name} and {info.name}")
    if not info.isreg() or info.issparse():
        raise ValueError(
            f"{info.name} is a link or sparse; tar --dereference --hard-dereference without "
            "--sparse writes whole files"
        )


def _crc(members: object) -> str:
    return checksum(json.dumps(members).encode())


def _index_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _about(pattern: str) -> dict[str, Any]:
    """What ``dataset.json`` says; nothing where there is none."""
    folder = pattern if os.path.isdir(pattern) else os.path.dirname(pattern)
    path = Path(folder) / ABOUT
    if not path.exists():
        return {}
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(name, str) for name in about["class_names"]):
            raise ValueError("names of classes must be text")
        statistics = {key: tuple(map(float, about[key])) for key in ("mean", "std")}
        if any(len(channels) != 3 for channels in statistics.values()):
            raise ValueError("mean and std must have three numbers")
        return {
            "class_names": list(about["class_names"]),
            "image_size": int(about["image_size"]),
            # Older versions have written none.
            "num_shards": {split: int(n) for split, n in about.get("num_shards", {}).items()},
            **statistics,
        }
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): write the shards again") from None


def _check_labels(rows: Sequence[tuple[str, _Row]], labels: Tensor, num_classes: int) -> None:
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        shard, row = rows[int(wrong[0])]
        raise ValueError(
            f"{shard}: {row[0]} has the label {row[3]}, and there are {num_classes} classes"
        )
