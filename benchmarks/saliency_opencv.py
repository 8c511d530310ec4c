"""SaliencyMix's saliency beside OpenCV's on the first 1,000 CIFAR-10 test images.

    python benchmarks/saliency_opencv.py --data DIR       needs opencv-contrib-python-headless

Prints on how many images map and peak are OpenCV's, and how often a peak within 2 pixels is found:
by OpenCV on normalized float images, as the authors pass them; on the next image; and, on the first
300, with red and blue exchanged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from alignmixup.datasets import load
from alignmixup.ops.saliency import fine_grained_saliency, saliency_peak

NUM_IMAGES, NUM_SWAPPED, NEAR = 1000, 300, 2


def opencv_map(image: np.ndarray) -> np.ndarray:
    detector = cv2.saliency.StaticSaliencyFineGrained_create()
    return np.round(255 * detector.computeSaliency(np.ascontiguousarray(image))[1])


def share_near(peaks: Tensor, others: Tensor) -> float:
    return 100 * float(((peaks - others).abs().amax(1) <= NEAR).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    test = load("cifar10", "test", parser.parse_args().data)
    pixels = test.images[:NUM_IMAGES]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (test.mean, test.std))
    maps = fine_grained_saliency(pixels / 255)
    peaks = saliency_peak(maps)
    bgr = torch.from_numpy(
        np.stack([opencv_map(x.flip(0).permute(1, 2, 0).numpy()) for x in pixels])
    )
    floats = ((pixels / 255 - mean) / std).permute(0, 2, 3, 1).numpy()
    authors = torch.from_numpy(np.stack([opencv_map(x) for x in floats]))
    swapped = saliency_peak(fine_grained_saliency(pixels[:NUM_SWAPPED].flip(1) / 255))
    print(f"OpenCV {cv2.__version__}, {NUM_IMAGES} images")
    print(f"map equal to OpenCV's: {int((maps == bgr).flatten(1).all(1).sum())}")
    print(f"peak equal to OpenCV's: {int((peaks == saliency_peak(bgr)).all(1).sum())}")
    print(f"sum above 255: {int((maps > 255).flatten(1).any(1).sum())}")
    print(f"peak of normalized floats near: {share_near(peaks, saliency_peak(authors)):.1f} %")
    print(f"peak of the next image near: {share_near(peaks, peaks.roll(-1, 0)):.1f} %")
    moved = 100 - share_near(peaks[:NUM_SWAPPED], swapped)
    print(f"moved by exchanging red and blue, {NUM_SWAPPED} images: {moved:.1f} %")


if __name__ == "__main__":
    main()
