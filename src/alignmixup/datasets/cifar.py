"""CIFAR-10 and CIFAR-100 from their official files, Python pickles or binary.

Both have one row of 3,072 bytes per image: the red, the green and the blue plane, each 32 x 32.
A pickle can run code. We read these with an unpickler that accepts five names and replaces each by
an inert class, so nothing in the file is ever called, not even numpy's constructors.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignmixup.contracts import ImageSet
from alignmixup.datasets.loading.download import Archive
from alignmixup.datasets.loading.layout import (
    PROTOCOL_MEAN,
    PROTOCOL_STD,
    SPLITS,
    check_split,
    data_root,
    find_folder,
    read_lines,
)
from alignmixup.registry import register_dataset

PLANES = 3 * 32 * 32


@dataclass(frozen=True)
class CifarLayout:
    """The official files of one of the two sets; the binary name of a file adds ``.bin``."""

    name: str
    num_classes: int
    python_folder: str
    binary_folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    train_records: int  # images in each train file
    test_records: int
    label_key: str  # of the pickled dict
    label_bytes: int  # before the pixels of a binary record; the last of them is the label
    meta_file: str
    meta_key: str
    binary_meta_file: str
    class_names: tuple[str, ...]  # if the meta file is missing
    archive: str
    sha256: str

    def files(self, split: str) -> tuple[str, ...]:
        return self.train_files if split == "train" else self.test_files

    def records(self, split: str) -> int:
        return self.train_records if split == "train" else self.test_records

    def is_binary(self, folder: Path) -> bool:
        return folder.name == self.binary_folder


CIFAR10 = CifarLayout(
    name="cifar10",
    num_classes=10,
    python_folder="cifar-10-batches-py",
    binary_folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_files=("test_batch",),
    train_records=10_000,
    test_records=10_000,
    label_key="labels",
    label_bytes=1,
    meta_file="batches.meta",
    meta_key="label_names",
    binary_meta_file="batches.meta.txt",
    class_names=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    archive="cifar-10-python.tar.gz",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
CIFAR100 = CifarLayout(
    name="cifar100",
    num_classes=100,
    python_folder="cifar-100-python",
    binary_folder="cifar-100-binary",
    train_files=("train",),
    test_files=("test",),
    train_records=50_000,
    test_records=10_000,
    label_key="fine_labels",
    label_bytes=2,
    meta_file="meta",
    meta_key="fine_label_names",
    binary_meta_file="fine_label_names.txt",
    class_names=tuple(f"class {i}" for i in range(100)),
    archive="cifar-100-python.tar.gz",
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
)


def load_cifar(layout: CifarLayout, root: Path | str | None, split: str) -> ImageSet:
    """Read one split, from the pickles if both kinds of files exist."""
    check_split(split)
    folder = _find(layout, root)
    parts = [_read_file(layout, folder, name, split) for name in layout.files(split)]
    return ImageSet(
        name=layout.name,
        split=split,
        images=torch.from_numpy(np.concatenate([part.pixels for part in parts])),
        labels=torch.from_numpy(np.concatenate([part.labels for part in parts])),
        class_names=_class_names(layout, folder),
        mean=PROTOCOL_MEAN,
        std=PROTOCOL_STD,
    )


def check_cifar(layout: CifarLayout, root: Path | str | None) -> list[str]:
    """Read every file and return one line for each that is missing or damaged."""
    try:
        folder = _find(layout, root)
    except FileNotFoundError as error:
        return [str(error)]
    files = [(name, split) for split in SPLITS for name in layout.files(split)]
    reads: list[Callable[[], object]] = [partial(_class_names, layout, folder)]
    reads[:0] = [partial(_read_file, layout, folder, name, split) for name, split in files]
    problems = []
    for read in reads:
        try:
            read()
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems


def _find(layout: CifarLayout, root: Path | str | None) -> Path:
    place, names = data_root(root), (layout.python_folder, layout.binary_folder)
    tried = [place] if place.name in names else [place / name for name in names]
    return find_folder(layout.name, tried, holds=())


@dataclass(frozen=True)
class _Batch:
    pixels: np.ndarray  # uint8 [n, 3, 32, 32]
    labels: np.ndarray  # int64 [n]


def _read_file(layout: CifarLayout, folder: Path, name: str, split: str) -> _Batch:
    is_binary, num_records = layout.is_binary(folder), layout.records(split)
    path = folder / (f"{name}.bin" if is_binary else name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; run 'alignmixup data fetch {layout.name}' to get it"
        )
    batch = _read_binary(layout, path) if is_binary else _read_pickle(layout, path)
    if len(batch.labels) != num_records:
        raise ValueError(
            f"{path} is damaged: it has {len(batch.labels)} images, not {num_records}; fetch again"
        )
    low, high = int(batch.labels.min()), int(batch.labels.max())
    if low < 0 or high >= layout.num_classes:
        raise ValueError(
            f"{path} is damaged: label {low if low < 0 else high} is not in "
            f"0..{layout.num_classes - 1}; fetch again"
        )
    return batch


def _read_binary(layout: CifarLayout, path: Path) -> _Batch:
    record = layout.label_bytes + PLANES
    flat = np.fromfile(path, dtype=np.uint8)
    if len(flat) == 0 or len(flat) % record:
        raise ValueError(
            f"{path} is damaged: {len(flat)} bytes are not a whole number of records of "
            f"{record} bytes; fetch again"
        )
    rows = flat.reshape(-1, record)
    pixels = np.ascontiguousarray(rows[:, layout.label_bytes :]).reshape(-1, 3, 32, 32)
    return _Batch(pixels, rows[:, layout.label_bytes - 1].astype(np.int64))


def _read_pickle(layout: CifarLayout, path: Path) -> _Batch:
    content = _unpickle(path)
    try:
        labels = np.array(content[layout.label_key], dtype=np.int64)
        pixels = _to_array(content["data"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged or not a {layout.name} file ({error!r})") from error
    if labels.ndim != 1 or pixels.shape != (len(labels), PLANES) or not len(labels):
        raise ValueError(
            f"{path} is damaged: data of shape {list(pixels.shape)} for {labels.size} labels; "
            f"expected [{labels.size}, {PLANES}]; fetch again"
        )
    return _Batch(pixels.reshape(-1, 3, 32, 32), labels)


def _unpickle(path: Path) -> dict[str, Any]:
    """Read a pickled dict with text keys without calling anything in the file."""
    try:
        with path.open("rb") as file:
            # The official files were written by Python 2; its strings are bytes.
            content = _InertUnpickler(file, encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is unsafe or damaged: {error}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} is damaged ({error!r}); fetch again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it contains no dict; fetch again")
    return {_text(key): value for key, value in content.items()}


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that replaces every global by a class that only records its state.

    The classes are created anew for each file, so that a file cannot change those of the next.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in protocol 2

            def encode(text: str, _encoding: str = "latin1") -> bytes:
                return text.encode("latin1")

            return encode
        if module.replace("numpy._core", "numpy.core") + "." + name not in (
            "numpy.core.multiarray._reconstruct",
            "numpy.ndarray",
            "numpy.dtype",
        ):
            raise pickle.UnpicklingError(
                f"it needs {module}.{name}, which no CIFAR file contains; do not trust this file"
            )

        class StandIn(_Inert):
            pass

        return StandIn


class _Inert:
    """The arguments and the state of a pickled numpy object."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _to_array(inert: Any) -> np.ndarray:
    """Convert the recorded state of a pickled uint8 array to an array."""
    if not isinstance(inert, _Inert):
        raise TypeError(f"expected an array, got {type(inert).__name__}")
    _version, shape, dtype, is_fortran, raw = inert.state
    if not isinstance(dtype, _Inert) or _text(dtype.args[0]) not in ("u1", "|u1"):
        raise TypeError("expected an array of bytes (uint8)")
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if is_fortran else "C")
    # A copy: the bytes of a pickle are read-only, and torch needs writable memory.
    return np.array(rows, order="C")


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _class_names(layout: CifarLayout, folder: Path) -> tuple[str, ...]:
    is_binary = layout.is_binary(folder)
    path = folder / (layout.binary_meta_file if is_binary else layout.meta_file)
    if not path.is_file():
        return layout.class_names
    if is_binary:
        names = tuple(name for line in read_lines(path) for name in line.split())
    else:
        listed = _unpickle(path).get(layout.meta_key)
        names = tuple(map(_text, listed)) if isinstance(listed, list) else ()
    if len(names) != layout.num_classes:
        raise ValueError(
            f"{path} is damaged: {len(names)} class names, not {layout.num_classes}; fetch again"
        )
    return names


for _layout in (CIFAR10, CIFAR100):
    register_dataset(
        _layout.name,
        description=f"{_layout.num_classes} classes, 50,000 train and 10,000 test images, 32 x 32",
        image_size=32,
        num_classes=_layout.num_classes,
        check=partial(check_cifar, _layout),
        find=partial(_find, _layout),
        archive=Archive(
            url=f"https://www.cs.toronto.edu/~kriz/{_layout.archive}",
            checksum=f"sha256:{_layout.sha256}",
            folder=_layout.python_folder,
        ),
    )(partial(load_cifar, _layout))
