"""Average precision (AP) of detections: as PASCAL VOC defines it, and as COCO does.

VOC, per class: detections are ranked by confidence. Each is compared with the true box of its image
that it overlaps most; with IoU >= 0.5 it is a hit if it is the first for that box, else a miss; it
is not counted if the box is marked as ignored. With p(r) the best precision at any recall >= r,

    11-point: (1/11) sum of p(0), p(0.1), ..., p(1)      (VOC 2007)
    area:     integral of p(r) dr                         (VOC 2010 and later)

COCO: pycocotools, which matches differently (a detection gets the best box that is still free) and
averages over IoU 0.50, 0.55, ..., 0.95. Labels count from 0; boxes have exclusive ends.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from alignmixup.evaluation.iou import box_iou

Floats = NDArray[np.float64]
NOTHING_TO_FIND = "no class has a true box that counts: there is no mean AP"


@dataclass(frozen=True, slots=True)
class Truth:
    """The objects of one image; COCO classifies sizes by ``areas``."""

    boxes: Float[np.ndarray, "k 4"]
    labels: Int[np.ndarray, " k"]
    is_ignored: Bool[np.ndarray, " k"]
    areas: Float[np.ndarray, " k"]
    size: tuple[int, int]  # width and height of the image


@dataclass(frozen=True, slots=True)
class Detected:
    """The detections of one image."""

    boxes: Float[np.ndarray, "n 4"]
    labels: Int[np.ndarray, " n"]
    scores: Float[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class VocPrecision:
    """The AP of each class in [0, 1], both ways; None for a class without a box to find."""

    eleven_point: tuple[float | None, ...]
    area: tuple[float | None, ...]

    @staticmethod
    def mean(values: Sequence[float | None]) -> float:
        """Return the mean over the classes that have one."""
        known = [value for value in values if value is not None]
        if not known:
            raise ValueError(NOTHING_TO_FIND)
        return sum(known) / len(known)


def voc_average_precision(
    truths: Sequence[Truth],
    detected: Sequence[Detected],
    num_classes: int,
    *,
    iou_threshold: float = 0.5,
) -> VocPrecision:
    """Return the AP of each class over all images."""
    _check(truths, detected, num_classes)
    eleven_point: list[float | None] = []
    area: list[float | None] = []
    for label in range(num_classes):
        num_true = sum(int(((t.labels == label) & ~t.is_ignored).sum()) for t in truths)
        if not num_true:
            eleven_point.append(None)
            area.append(None)
            continue
        is_hit = _hits(truths, detected, label, iou_threshold)
        hits = is_hit.cumsum()
        # The best precision from here on.
        best = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
        area.append(float(best[is_hit].sum()) / num_true)
        # Recall h / n reaches i / 10 where 10 h >= i n: in integers, since 3 / 10 < 3 * 0.1.
        reached = [np.flatnonzero(10 * hits >= i * num_true) for i in range(11)]
        eleven_point.append(sum(float(best[r[0]]) for r in reached if len(r)) / 11)
    return VocPrecision(tuple(eleven_point), tuple(area))


def _check(truths: Sequence[Truth], detected: Sequence[Detected], num_classes: int) -> None:
    if not truths or len(truths) != len(detected):
        raise ValueError(
            f"one record of detections per image is needed, got {len(detected)} for {len(truths)}"
        )
    for labels in (*(t.labels for t in truths), *(d.labels for d in detected)):
        if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
            raise ValueError(
                f"labels must lie in 0..{num_classes - 1}, got {labels.min()} to {labels.max()}"
            )


def _hits(
    truths: Sequence[Truth], detected: Sequence[Detected], label: int, iou_threshold: float
) -> NDArray[np.bool_]:
    """Return for each detection of the class that counts whether it is a hit, best score first."""
    scores: list[Floats] = [np.zeros(0)]
    claims: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    num_boxes = 0
    for truth, found in zip(truths, detected, strict=True):
        mine, wanted = found.labels == label, truth.labels == label
        score, claim = found.scores[mine], np.full(int(mine.sum()), -1)
        if wanted.any() and mine.any():
            overlap = box_iou(found.boxes[mine], truth.boxes[wanted])
            best = overlap.argmax(axis=1)
            is_close = overlap.max(axis=1) >= iou_threshold
            claim = np.where(is_close, num_boxes + best, -1)
            is_counted = ~(is_close & truth.is_ignored[wanted][best])
            score, claim = score[is_counted], claim[is_counted]
        num_boxes += int(wanted.sum())
        scores.append(score)
        claims.append(claim)
    ranked = np.concatenate(claims)[np.argsort(-np.concatenate(scores), kind="stable")]
    is_hit = np.zeros(len(ranked), bool)
    is_hit[np.unique(ranked, return_index=True)[1]] = True  # the first to claim a box
    return is_hit & (ranked >= 0)


def coco_average_precision(
    truths: Sequence[Truth], detected: Sequence[Detected], num_classes: int
) -> dict[str, float]:
    """Return ``map``, ``map50`` and ``map75`` in [0, 1], as pycocotools computes them."""
    _check(truths, detected, num_classes)
    if all(truth.is_ignored.all() for truth in truths):
        raise ValueError(NOTHING_TO_FIND)  # pycocotools would return -1
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ImportError("pycocotools is missing: pip install alignmixup[detection]") from error
    truth = COCO()
    truth.dataset = _coco_document(truths, num_classes)
    rows = [
        {"image_id": i, "category_id": int(label), "bbox": _corner_and_size(box), "score": score}
        for i, found in enumerate(detected)
        for box, label, score in zip(found.boxes, found.labels, found.scores.tolist(), strict=True)
    ]
    if not rows:
        return {"map": 0.0, "map50": 0.0, "map75": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(rows), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return {"map": judge.stats[0], "map50": judge.stats[1], "map75": judge.stats[2]}


def _coco_document(truths: Sequence[Truth], num_classes: int) -> dict[str, object]:
    annotations = [
        {
            "image_id": i,
            "category_id": int(truth.labels[k]),
            "bbox": _corner_and_size(truth.boxes[k]),
            "area": float(truth.areas[k]),
            "iscrowd": int(truth.is_ignored[k]),
        }
        for i, truth in enumerate(truths)
        for k in range(len(truth.labels))
    ]
    # Numbered from 1: pycocotools marks a detection without a match by annotation 0.
    numbered = [{"id": i, **row} for i, row in enumerate(annotations, start=1)]
    images = [{"id": i, "width": t.size[0], "height": t.size[1]} for i, t in enumerate(truths)]
    categories = [{"id": k, "name": str(k)} for k in range(num_classes)]
    return {"images": images, "annotations": numbered, "categories": categories, "info": {}}


def _corner_and_size(box: NDArray[np.floating]) -> list[float]:
    x0, y0, x1, y1 = (float(v) for v in box)
    return [x0, y0, x1 - x0, y1 - y0]
