"""Images a second that one core decodes for training: our stream and torch's DataLoader with PIL.

    PYTHONPATH=src python benchmarks/decoding.py [--out FILE.csv] [--images 200] [--rounds 5]

The JPEGs are synthetic: smoothed noise of quality 90, at 500 x 375 about as large as the mean file
of ImageNet's training images (138 GB for 1,281,167: 108 kB). Each becomes a random part, resized
(bilinear), mirrored half the time, in a float batch of 50. All loaders run in this process with one
thread, in turns; the time is that of its processor, so that a busy machine counts little. A row
holds p20, p50 and p80 of the rounds.

    stream           our StreamLoader, files
    stream, workers  its part in the decoding processes; a GPU converts to float by itself
    stream, reduced  the same with ``reduced=True``: JPEG at 1/2, 1/4 or 1/8 of its size
    stream, shards   the same images in tar files
    torch + PIL      a Dataset that opens, crops and resizes with PIL, as torchvision's does
    torchvision      decode_jpeg and RandomResizedCrop on tensors, where torchvision imports
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image, features
from torch.utils.data import DataLoader, Dataset

from alignmixup import datasets
from alignmixup.datasets.folder import FileSet
from alignmixup.experiments.provenance import provenance

BATCH = 50
# Width and height of the files, side of the batches.
CASES = [(500, 375, 224), (500, 375, 128), (1024, 768, 224)]
COLUMNS = "name,width,height,side,kb,p20,p50,p80,hardware,pillow,turbo,torch,commit,date"

Loader = Callable[[int], Iterable[object]]


def write_images(root: Path, count: int, width: int, height: int) -> float:
    """Write them under root/train/a and, one, root/val/a; return the mean size in kB."""
    rng = np.random.default_rng(0)
    sizes = []
    for i in range(count + 1):
        path = root / ("val" if i == count else "train") / "a" / f"{i:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((height, width, 3), dtype=np.float32)
        for scale, strength in ((64, 60.0), (8, 25.0), (2, 38.0)):
            shape = (height // scale + 1, width // scale + 1, 3)
            noise = (rng.standard_normal(shape) * strength + 128).clip(0, 255).astype(np.uint8)
            layer = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
            pixels += np.asarray(layer, dtype=np.float32) - 128
        Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        sizes.append(path.stat().st_size)
    return statistics.mean(sizes) / 1000


class PilFiles(Dataset[tuple[torch.Tensor, int]]):
    """What a user writes without us: PIL for everything, float tensors [3, s, s]."""

    def __init__(self, paths: tuple[str, ...], side: int) -> None:
        self.paths, self.side, self.rng = paths, side, random.Random(0)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        left, top, w, h = random_box(*image.size, self.rng)
        part = image.crop((left, top, left + w, top + h))
        part = part.resize((self.side, self.side), Image.Resampling.BILINEAR)
        if self.rng.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()
        return pixels.float().div(255), 0


def random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    for _ in range(10):
        surface = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(surface * ratio)), round(math.sqrt(surface / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, width - w), rng.randint(0, height - h), w, h
    return 0, 0, width, height


def torchvision_files(paths: tuple[str, ...], side: int) -> Dataset[Any] | None:
    """The tensor way of torchvision; None where it does not import."""
    try:
        from torchvision.io import decode_jpeg, read_file
        from torchvision.transforms import v2

        decode_jpeg(read_file(paths[0]))
    except (ImportError, RuntimeError) as error:
        print(f"torchvision is left out: {' '.join(str(error).split())[:80]}")
        return None
    change = v2.Compose(
        [
            v2.RandomResizedCrop(side, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )

    class TensorFiles(Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return change(decode_jpeg(read_file(paths[index]))), 0

    return TensorFiles()


def loaders(root: Path, side: int) -> dict[str, Loader]:
    """Each as a function of the epoch."""
    files = datasets.scan_folder(root, "train")
    entry = datasets.find(f"folder:{root}")
    shards = datasets.scan_shards(
        str(datasets.write_shards(entry, root / "shards", images_per_shard=50)), "train"
    )

    def stream(file_set: FileSet, reduced: bool = False) -> Loader:
        return datasets.StreamLoader(file_set, BATCH, side, seed=0, reduced=reduced).epoch

    def workers(file_set: FileSet) -> Loader:
        loader = datasets.StreamLoader(file_set, BATCH, side, seed=0)

        def epoch(number: int) -> Iterable[object]:
            loader._order.epoch = number
            return loader._loader

        return epoch

    def plain(data: Dataset[Any]) -> Loader:
        return lambda epoch: DataLoader(data, BATCH, shuffle=True)

    found = {
        "stream": stream(files),
        "stream, workers": workers(files),
        "stream, reduced": stream(files, reduced=True),
        "stream, shards": stream(shards),
        "torch + PIL": plain(PilFiles(files.paths, side)),
    }
    vision = torchvision_files(files.paths, side)
    return found if vision is None else {**found, "torchvision": plain(vision)}


def measure(ways: dict[str, Loader], num_images: int, rounds: int) -> dict[str, list[float]]:
    """Images a second of processor time, each way in turn; the first round is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin = time.process_time()
            for _ in way(number):
                pass
            if number:
                rates[name].append(num_images / (time.process_time() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {
        "hardware": processor(),
        "pillow": PIL.__version__,
        "turbo": features.version("libjpeg_turbo") or "no",
        "torch": torch.__version__,
        "commit": provenance().get("commit", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    rows = []
    for width, height, side in CASES:
        with tempfile.TemporaryDirectory() as folder:
            kb = write_images(Path(folder), args.images, width, height)
            rates = measure(loaders(Path(folder), side), args.images, args.rounds)
        for name, values in rates.items():
            p20, p50, p80 = np.percentile(values, [20, 50, 80])
            print(f"{width} x {height} to {side}, {kb:.0f} kB: {name:16} {p50:7.1f} images/s")
            figures = (
                name,
                width,
                height,
                side,
                f"{kb:.0f}",
                *(f"{p:.1f}" for p in (p20, p50, p80)),
            )
            rows.append([*figures, *about.values()])
    if args.out is not None:
        is_new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS.split(","), *rows] if is_new else rows)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
