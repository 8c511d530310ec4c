"""A folder of a few images of two classes, as ``--dataset folder:...`` reads it."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

__all__ = ["make_pictures"]


def make_pictures(root: Path, num_train: int = 8, num_val: int = 4, side: int = 32) -> str:
    """Write them under ``root``, so many a class; return the name of the data set."""
    for split, count in (("train", num_train), ("val", num_val)):
        for name, color in (("dark", 40), ("light", 200)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (side, side), (color, color + i, color)).save(folder / f"{i}.png")
    return f"folder:{root}@{side}"
