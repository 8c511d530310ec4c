"""The average precision of a detector, by the rules of VOC or of COCO, in percent.

    results = detection(detector, voc_test, style="voc")

Labels count from 0 here, from 1 inside torchvision's detectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from alignmixup.contracts import Result
from alignmixup.datasets.voc import DetectionExample, DetectionSet
from alignmixup.evaluation.detection.average_precision import (
    Detected,
    Truth,
    VocPrecision,
    coco_average_precision,
    voc_average_precision,
)
from alignmixup.evaluation.forward import model_device
from alignmixup.hooks import evaluating

OnImages = Callable[[int], None]


def detect(
    detector: nn.Module,
    examples: DetectionSet,
    *,
    batch_size: int = 8,
    on_images: OnImages | None = None,
) -> tuple[list[Detected], list[Truth]]:
    """Run the detector over all examples, in order, and return its detections and the truth.

    ``on_images`` is called after each batch with the number of its images.
    """
    if not len(examples):
        raise ValueError("there are no examples to detect in")
    device = model_device(detector) or torch.device("cpu")
    found: list[Detected] = []
    truths: list[Truth] = []
    with evaluating(detector), torch.no_grad():
        for first in range(0, len(examples), batch_size):
            batch = [examples[i] for i in range(first, min(first + batch_size, len(examples)))]
            images = [example.image.to(device).float() / 255 for example in batch]
            for example, output in zip(batch, detector(images), strict=True):
                found.append(_detected(output))
                truths.append(_truth(example))
            if on_images is not None:
                on_images(len(batch))
    return found, truths


def _detected(output: dict[str, Tensor]) -> Detected:
    return Detected(
        boxes=output["boxes"].double().cpu().numpy(),
        labels=output["labels"].cpu().numpy() - 1,
        scores=output["scores"].double().cpu().numpy(),
    )


def _truth(example: DetectionExample) -> Truth:
    return Truth(
        boxes=example.boxes.double().cpu().numpy(),
        labels=example.labels.cpu().numpy(),
        is_ignored=example.is_ignored.cpu().numpy().astype(bool),
        areas=example.areas.double().cpu().numpy(),
        size=(example.image.shape[2], example.image.shape[1]),
    )


def detection(
    detector: nn.Module,
    examples: DetectionSet,
    *,
    style: Literal["voc", "coco"],
    batch_size: int = 8,
    on_images: OnImages | None = None,
) -> list[Result]:
    """Return ``map`` and related metrics, in percent, by the rules of VOC or of COCO.

    VOC: ``map`` is the 11-point AP at IoU 0.5 and ``map_area`` the area under the curve. COCO:
    ``map`` over IoU 0.50 to 0.95, ``map50``, ``map75``.
    """
    if style not in ("voc", "coco"):
        raise ValueError(f"style must be 'voc' or 'coco', got {style!r}")
    found, truths = detect(detector, examples, batch_size=batch_size, on_images=on_images)
    names = examples.class_names
    settings: dict[str, object] = {
        "style": style,
        "detector": type(detector).__name__,
        "num_images": len(truths),
        "num_classes": len(names),
    }
    if style == "coco":
        values = coco_average_precision(truths, found, len(names))
        return [Result("detection", m, 100 * float(v), settings) for m, v in values.items()]
    precision = voc_average_precision(truths, found, len(names))
    results = []
    for metric, kind in (("map", "eleven_point"), ("map_area", "area")):
        by_class = getattr(precision, kind)
        shown = {n: v if v is None else 100 * v for n, v in zip(names, by_class, strict=True)}
        details = {**settings, "iou_threshold": 0.5, "precision": kind, "by_class": shown}
        value = 100 * VocPrecision.mean(by_class)
        results.append(Result("detection", metric, value, details))
    return results
