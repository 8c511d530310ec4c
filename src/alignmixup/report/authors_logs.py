"""Test accuracy in the training logs that the authors of AlignMixup published, at some epochs.

PreActResNet-18, 2,000 epochs, learning rate 0.1 divided by 10 at epochs 500, 1,000 and 1,500. The
points are (epochs trained, top-1 in per cent); the logs count epochs from 0.
"""

from __future__ import annotations

LOGS: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {
    ("cifar10", "preact_resnet18"): (
        (1, 43.59), (3, 65.54), (10, 84.10), (50, 91.02), (100, 90.75), (200, 88.76), (300, 90.64),
        (400, 92.92), (500, 91.74), (510, 95.66), (550, 96.04), (600, 95.77), (900, 95.11),
        (1000, 95.19), (1010, 96.49), (1100, 96.40), (1200, 96.73), (1300, 96.80), (1500, 96.73),
        (1900, 96.92), (2000, 96.85),
    ),
    ("cifar100", "preact_resnet18"): (
        (1, 12.18), (3, 26.21), (10, 56.58), (50, 68.88), (100, 69.26), (200, 69.58), (300, 71.32),
        (400, 72.51), (500, 70.07), (510, 78.93), (550, 79.33), (600, 79.39), (900, 78.47),
        (1000, 77.87), (1010, 79.74), (1100, 81.20), (1200, 81.12), (1300, 81.49), (1500, 81.11),
        (1900, 81.42), (2000, 81.54),
    ),
}  # fmt: skip
