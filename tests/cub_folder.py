"""CUB-200-2011's official folder at small size, for tests."""

from __future__ import annotations

import numpy as np
from PIL import Image

from alignmixup.datasets.cub import CubLayout

__all__ = ["BIRDS", "CLASSES", "IS_TRAIN", "LAYOUT", "make_cub"]

LAYOUT = CubLayout(num_images=6, num_train=4, num_classes=2)
CLASSES = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
# width, height, and a box x, y, w, h that is painted white on black
BIRDS = [
    (40, 20, (10.0, 4.0, 20.0, 8.0)),
    (20, 40, (0.0, 0.0, 10.0, 20.0)),
    (30, 30, (15.0, 15.0, 15.0, 15.0)),
    (16, 16, (4.0, 4.0, 8.0, 8.0)),
    (50, 25, (25.0, 5.0, 20.0, 10.0)),
    (32, 24, (8.0, 6.0, 24.0, 20.0)),  # two pixels too high
]
IS_TRAIN = [1, 0, 1, 1, 0, 1]
LABELS = [1, 1, 1, 2, 2, 2]


def make_cub(tmp_path):
    """Write the official folder with six images of two classes."""
    folder = tmp_path / "CUB_200_2011"
    files = {name: [] for name in ("images", "image_class_labels", "train_test_split")}
    boxes = []
    for i, (width, height, (x, y, w, h)) in enumerate(BIRDS):
        name = f"{CLASSES[LABELS[i] - 1]}/bird_{i}.png"  # lossless, so that edges can be checked
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[int(y) : int(y + h), int(x) : int(x + w)] = 255
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        files["images"].append(f"{i + 1} {name}")
        files["image_class_labels"].append(f"{i + 1} {LABELS[i]}")
        files["train_test_split"].append(f"{i + 1} {IS_TRAIN[i]}")
        boxes.append(f"{i + 1} {x} {y} {w} {h}")
    files["bounding_boxes"] = boxes
    files["classes"] = [f"{k + 1} {name}" for k, name in enumerate(CLASSES)]
    for name, lines in files.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
