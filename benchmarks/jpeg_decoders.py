"""Is another JPEG decoder faster than Pillow's? Images a second of one core, in the same run.

    PYTHONPATH=src python benchmarks/jpeg_decoders.py

Needs `pip install simplejpeg`, a binding of libjpeg-turbo. The images are those of decoding.py, in
memory; the middle of each (80 % of both sides) becomes a square of 224 pixels by Pillow's bilinear
resize. "reduced" decodes at a fraction of the size that leaves enough pixels: Pillow's draft mode,
or ``min_height`` and ``min_width`` of simplejpeg. Decoders take turns; the time is that of the
processor, the median of the rounds.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, features

from decoding import write_images

SIDE, SHOWN, ROUNDS = 224, 0.8, 7
SIZES = [(500, 375), (1024, 768)]
ENOUGH = int(SIDE / SHOWN)


def shown(image: Image.Image) -> np.ndarray:
    (w, h), edge = image.size, (1 - SHOWN) / 2
    box = (w * edge, h * edge, w * (1 - edge), h * (1 - edge))
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


def pillow(data: bytes, *, reduced: bool = False) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    if reduced:
        image.draft("RGB", (ENOUGH, ENOUGH))
    return shown(image.convert("RGB"))


def other(data: bytes, *, reduced: bool = False) -> np.ndarray:
    least = ENOUGH if reduced else 0
    return shown(Image.fromarray(simplejpeg.decode_jpeg(data, min_height=least, min_width=least)))


DECODERS: dict[str, Callable[[bytes], np.ndarray]] = {
    "Pillow": pillow,
    "simplejpeg": other,
    "Pillow, reduced": lambda data: pillow(data, reduced=True),
    "simplejpeg, reduced": lambda data: other(data, reduced=True),
}


def main() -> None:
    print(f"libjpeg-turbo of Pillow: {features.version('libjpeg_turbo')}")
    for width, height in SIZES:
        root = Path(tempfile.mkdtemp())
        write_images(root, 60, width, height)
        files = [path.read_bytes() for path in sorted((root / "train" / "a").iterdir())]
        rates: dict[str, list[float]] = {name: [] for name in DECODERS}
        for _ in range(ROUNDS):
            for name, decode in DECODERS.items():
                began = time.process_time()
                for data in files:
                    decode(data)
                rates[name].append(len(files) / (time.process_time() - began))
        print(f"{width} x {height}:", {k: round(statistics.median(v)) for k, v in rates.items()})


if __name__ == "__main__":
    main()
