"""Decode image files to RGB squares; raise with the name of a file that cannot be read.

An image of any shape becomes the centered square of its shorter side, resized (bilinear, with
Pillow's anti-aliasing): the usual "resize the shorter side, then crop the center", in one step.
The orientation in EXIF and transparency are ignored, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from alignmixup.datasets.loading.members import Member

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

# What a file may be, whatever its name. Pillow knows some fifty formats, and one of them (EPS)
# starts Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 2**27  # 134 megapixels, 400 MB in RGB: a larger one is damaged, or an attack

IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


def read_rgb(path: Path | str) -> Image.Image:
    """Decode one file to 8-bit RGB; gray, palette, CMYK and 16-bit images are converted."""
    with open_image(path) as image:
        return to_rgb(image)


def reduce_scale(image: Image.Image, box: tuple[float, float, float, float], side: int) -> float:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 of its size, if ``box`` keeps ``side`` pixels or more.

    The decoder then does less work. Other formats are decoded whole. Returns the scale, not the
    quotient of the sides: they are rounded up, and the last pixel may lie beyond the image in part.
    """
    left, top, right, bottom = box
    width, height = image.size
    least = (math.ceil(width * side / (right - left)), math.ceil(height * side / (bottom - top)))
    drafted = image.draft(None, least)  # the smallest scale that has at least so many pixels
    return 1.0 if drafted is None else drafted[1][2] / width


@contextmanager
def open_image(path: Path | str) -> Iterator[Image.Image]:
    """Open an image file, the only way that files are opened: its size is known, no pixel is read.

    The path may be that of a member of a tar file (see ``members``).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is empty, damaged, too large, or in none of ``FORMATS``; so is any error
            within the block.
    """
    from PIL import Image, UnidentifiedImageError

    member = Member.of(path) if isinstance(path, str) else None
    source: Path | str | io.BytesIO = path
    if member is not None:
        source, path, size = io.BytesIO(member.read()), str(member), member.size
    else:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if not re.match("[a-z]{2,}:/", str(path)):
                raise FileNotFoundError(f"{path} is missing") from None
            address = re.sub(":/+", "://", str(path), count=1)  # a Path has one slash
            raise FileNotFoundError(
                f"{address} is an address, not a file: download it first"
            ) from None
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path} is a folder, not an image file: name the files in it")
        size = status.st_size
        if stat.S_ISFIFO(status.st_mode):  # a pipe has no size and cannot seek
            data = Path(path).read_bytes()
            source, size = io.BytesIO(data), len(data)
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes): replace or delete it")
    try:
        # Pillow warns about damaged metadata and still decodes the pixels.
        with _NO_WARNINGS, Image.open(source, formats=FORMATS) as image:
            if math.prod(image.size) > MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            yield image
    except UnidentifiedImageError:
        raise ValueError(
            f"{path} cannot be read as an image (it is none of {', '.join(FORMATS)}): replace or "
            "delete it"
        ) from None
    except Exception as error:  # Pillow's decoders raise almost anything on damaged input
        raise ValueError(
            f"{path} cannot be read as an image ({error}): replace or delete it"
        ) from error


class _NoWarnings:
    """Ignores warnings while any thread is inside.

    ``catch_warnings`` of threads that overlap would restore each other's filters: warnings would
    be ignored from then on.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._filters.__exit__(None, None, None)


_NO_WARNINGS = _NoWarnings()


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an opened image and convert it to 8-bit RGB."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16-bit gray: Pillow's own conversion would clip at 255
        levels = np.asarray(image)
        low, high = int(levels.min()), int(levels.max())
        if low < 0 or high > 65535:
            raise ValueError(f"its pixels lie in {low}..{high}, beyond 16 bits: save it with 8")
        wide = image.mode != "I" or high > 255
        image = Image.fromarray((levels >> 8 if wide else levels).astype(np.uint8))
    if image.mode == "F":
        raise ValueError(
            "it has floating-point pixels without a known white level: save it with 8 bits"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def center_square(
    image: Image.Image, image_size: int, fraction: float = 1.0, *, squash: bool = False
) -> Image.Image:
    """Return the centered square, ``fraction`` of the shorter side, resized to ``image_size``.

    With ``squash`` it is the central ``fraction`` of both sides.
    """
    from PIL import Image

    if image.size == (image_size, image_size) and fraction == 1.0:
        return image
    width, height = image.size
    across, down = (side * fraction for side in (image.size if squash else [min(image.size)] * 2))
    left, top = (width - across) / 2, (height - down) / 2
    box = (left, top, left + across, top + down)
    return image.resize((image_size, image_size), Image.Resampling.BILINEAR, box=box)


# Small JPEGs spend their time in Python: threads are slower than one process (measured: 1.4x) and
# processes are faster. For fewer files, starting processes costs more than it saves.
PARALLEL_FROM = 4000
BLOCK = 250

DEAD_WORKER = "a process that decodes images has died: look for its reason, memory first; run again"


def decode_files(
    paths: Sequence[str], image_size: int, num_workers: int | None = None, *, fraction: float = 1.0
) -> UInt8[Tensor, "n 3 s s"]:
    """Decode all files to one array, in order, each as its ``center_square``.

    ``num_workers=None`` chooses by the number of files.
    """
    images = empty_images(len(paths), image_size)
    start = 0
    work = partial(_decode_block, image_size=image_size, fraction=fraction)
    for block in _map_blocks(work, paths, num_workers):
        images[start : start + len(block)] = torch.from_numpy(block)
        start += len(block)
    return images


def empty_images(count: int, image_size: int) -> UInt8[Tensor, "n 3 s s"]:
    """Allocate memory for square images of side ``image_size``."""
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size}")
    try:
        return torch.empty(count, 3, image_size, image_size, dtype=torch.uint8)
    except RuntimeError as error:
        size = count * 3 * image_size**2 / 2**30
        raise ValueError(
            f"{count:,} images of {image_size} x {image_size} pixels do not fit into memory "
            f"({size:,.0f} GiB): choose a smaller size, or stream them with data.stream=True"
        ) from error


def unreadable_files(paths: Sequence[str], num_workers: int | None = None) -> list[str]:
    """Decode all files and return one line for each that cannot be read."""
    blocks = _map_blocks(_problems_in_block, paths, num_workers)
    return [problem for block in blocks for problem in block]


def _map_blocks(
    work: Callable[[Sequence[str]], T], paths: Sequence[str], num_workers: int | None
) -> Iterator[T]:
    """Apply ``work`` to blocks of paths, in order, in processes if it pays."""
    blocks = [paths[i : i + BLOCK] for i in range(0, len(paths), BLOCK)]
    if num_workers is None:
        num_workers = available_cores() if len(paths) >= PARALLEL_FROM else 1
    # Only fork: the other start methods run the user's script again.
    if num_workers <= 1 or sys.platform != "linux":
        yield from map(work, blocks)
        return
    fork = get_context("fork")
    with ProcessPoolExecutor(num_workers, mp_context=fork, initializer=end_with_parent) as pool:
        try:
            yield from pool.map(work, blocks)
        except BrokenProcessPool:
            raise RuntimeError(DEAD_WORKER) from None


def end_with_parent() -> None:
    """End this process once the one that started it has ended, however that was.

    It would wait for work without end, and hold the lock of the run, which a fork inherits.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _decode_block(paths: Sequence[str], image_size: int, fraction: float) -> np.ndarray:
    squares = [np.asarray(center_square(read_rgb(path), image_size, fraction)) for path in paths]
    return np.ascontiguousarray(np.stack(squares).transpose(0, 3, 1, 2))


def _problems_in_block(paths: Sequence[str]) -> list[str]:
    problems = []
    for path in paths:
        try:
            read_rgb(path)
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
    return problems


def available_cores() -> int:
    """Return the number of decoding processes: the cores this process may use, at most 32.

    The processes that torchrun has started on this machine share its cores.
    """
    num_shares = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(own_cores() // num_shares, 1), 32)


def own_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
