"""Weakly supervised localization: how well a class activation map (CAM) covers the object.

The map is resized to the image (bicubic), scaled to [0, 1] by its minimum and maximum and rounded
down to bytes. The mask of a threshold tau has the pixels with byte > int(tau * 255); the box of one
of its contours is compared with the true boxes of the image. In percent of all images:

    gt_known_loc  CAM of the true class, tau = 0.15, one box, IoU >= 0.5 with a true box
    top1_loc      the same with the predicted class, which must be right; then both classes have
                  the same CAM, so one map per image serves both
    maxboxacc     max over tau of the share of images with IoU >= 0.5; largest contour
    maxboxacc_v2  the same at IoU >= 0.3, 0.5 and 0.7, averaged; best of all contours, holes too

The last two are those of Choe et al. 2020 (CAM of the true class; tau in steps of 0.001, chosen
once for the whole set, separately for each IoU). A constant map has no contour.

The one box of the first two is that of the largest contour (``box="contour"``), as in the code of
Choe et al. and of Co-Mixup, or that of all pixels above the threshold (``box="mask"``), as the
text of the AlignMixup paper reads.

Two conventions for the IoU. ``"reference"`` is that of the authors' code: it takes the exclusive
end of a predicted box (kept inside the image) and of a true box (rounded down) for its last pixel,
so that both boxes are one pixel too large. Published numbers use it. ``"exact"`` is the IoU of the
boxes themselves.

On CUB, whose list has exclusive ends, ``"reference"`` is the authors' rule. Lists of ImageNet and
Tiny-ImageNet have the last pixel itself, which the authors' code uses directly; we convert it to an
exclusive end first, so that our true boxes are one pixel larger. This changes 0.17 % of the
decisions at IoU 0.5 (20,000 simulated pairs of boxes, 500 x 375 pixels shown as 224 x 224).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup.checking import check_choices
from alignmixup.contracts import Result, Skipped
from alignmixup.evaluation.component_tree import NUM_LEVELS
from alignmixup.evaluation.contours import Box, LevelBoxes, level_boxes, mask_box
from alignmixup.evaluation.forward import ALONE, Batches, Normalization, amp_name, model_device
from alignmixup.evaluation.heat import Floats, HeatImage, Scan
from alignmixup.evaluation.iou import box_iou
from alignmixup.registry import register_task
from alignmixup.training.distributed import Team

Convention = Literal["reference", "exact"]


@dataclass(frozen=True, slots=True)
class LocalizationSettings:
    """Settings of the metrics; the defaults are those of the benchmark.

    ``box`` is the one box at ``cam_threshold``: that of the largest contour, or of the whole mask.
    """

    cam_threshold: float = 0.15
    iou_threshold: float = 0.5
    v2_iou_thresholds: tuple[float, ...] = (0.3, 0.5, 0.7)
    threshold_step: float = 0.001
    convention: Convention = "reference"
    box: Literal["contour", "mask"] = "contour"

    def __post_init__(self) -> None:
        if not 0 <= self.cam_threshold < 1:
            raise ValueError(f"cam_threshold must lie in [0, 1), got {self.cam_threshold}")
        if not 0 < self.threshold_step <= 1:
            raise ValueError(f"threshold_step must lie in (0, 1], got {self.threshold_step}")
        if not self.v2_iou_thresholds:
            raise ValueError("v2_iou_thresholds is empty: name at least one, e.g. (0.3, 0.5, 0.7)")
        for delta in (self.iou_threshold, *self.v2_iou_thresholds):
            if not 0 < delta <= 1:
                raise ValueError(f"an IoU threshold must lie in (0, 1], got {delta}")
        check_choices(self)


DEFAULT = LocalizationSettings()


@register_task("localization", about="boxes from class activation maps; needs data with boxes")
def localization(
    model: nn.Module,
    batches: Batches,
    boxes: Sequence[Tensor] | None,
    *,
    settings: LocalizationSettings = DEFAULT,
    layer: str | None = None,
    classifier: str | None = None,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return ``gt_known_loc``, ``top1_loc``, ``maxboxacc`` and ``maxboxacc_v2``, in percent.

    ``boxes`` has the true boxes [k, 4] of each image, in the order of the batches; images without a
    box are left out. ``layer`` and ``classifier`` name the layers around the global pool; by
    default they are found. A process of ``team`` gets the batches of its share, and all boxes.
    """
    if boxes is None or not any(len(of_image) for of_image in boxes):
        raise Skipped("no image has a box")
    tally = _Tally(settings)
    scan = Scan(model, boxes, layer, classifier, normalized_by, amp_dtype, team)
    with team.agreed():
        for image in scan.images(batches):
            contours = level_boxes(image.heat, image.order)
            shape = image.heat.shape
            overlap = _overlap_by_level(contours, image.boxes, shape, settings.convention)
            found = _one_box(image, contours, settings)
            tally.add(overlap, found.iou, image.predicted == image.label)
    tally.join(team, model_device(model) or torch.device("cpu"))
    common = {"num_images": tally.num_images, "amp_dtype": amp_name(amp_dtype), **scan.layers()}
    return tally.results(common)


class _OneBox(NamedTuple):
    """The box at the fixed threshold, and its best IoU with a true box."""

    box: Box | None
    iou: float


def _one_box(image: HeatImage, contours: LevelBoxes, settings: LocalizationSettings) -> _OneBox:
    level = _level_of(settings.cam_threshold)
    is_mask = settings.box == "mask"
    box = mask_box(image.heat, level) if is_mask else contours.largest_box(level)
    corners = np.array([box or (0, 0, 0, 0)])
    overlap = _iou(corners, image.boxes, image.heat.shape, settings.convention)
    return _OneBox(box, float(overlap.max()))


class _Overlap(NamedTuple):
    """The best IoU with a true box at each level: by the largest contour, and by any."""

    largest: Floats
    any: Floats


def _overlap_by_level(
    contours: LevelBoxes, truth: Floats, shape: tuple[int, ...], convention: Convention
) -> _Overlap:
    nothing = np.zeros((1, 4))
    best = _iou(nothing, truth, shape, convention).max()
    largest, anything = np.full(NUM_LEVELS, best), np.full(NUM_LEVELS, best)
    overlap = _iou(contours.boxes, truth, shape, convention).max(axis=1, initial=0)
    # The empty box counts only at levels without a contour.
    anything[np.unique(contours.levels)] = 0
    np.maximum.at(anything, contours.levels, overlap)
    chosen = contours.largest()
    largest[contours.levels[chosen]] = overlap[chosen]
    return _Overlap(largest, anything)


def _iou(
    predicted: NDArray[np.int64] | Floats,
    truth: Floats,
    shape: tuple[int, ...],
    convention: Convention,
) -> Floats:
    if convention == "exact":
        return box_iou(predicted, truth)
    # Ends taken for last pixels are one larger as exclusive ends.
    h, w = shape
    last = np.minimum(predicted[:, 2:], np.array([w - 1, h - 1]))
    widened = np.concatenate([predicted[:, :2], last + 1], axis=1)
    return box_iou(widened, np.trunc(truth) + np.array([0, 0, 1, 1]))


class _Tally:
    """Counts of images whose IoU is large enough, by level."""

    def __init__(self, settings: LocalizationSettings) -> None:
        self.settings = settings
        self.num_images = 0
        self.num_known = self.num_top1 = 0
        self.largest = np.zeros(NUM_LEVELS, np.int64)
        self.any = np.zeros((len(settings.v2_iou_thresholds), NUM_LEVELS), np.int64)

    def add(self, overlap: _Overlap, iou: float, is_right: bool) -> None:
        self.num_images += 1
        self.num_known += iou >= self.settings.iou_threshold
        self.num_top1 += iou >= self.settings.iou_threshold and is_right
        self.largest += overlap.largest >= self.settings.iou_threshold
        self.any += overlap.any >= np.array(self.settings.v2_iou_thresholds)[:, None]

    def join(self, team: Team, device: torch.device) -> None:
        """Add the counts of the other processes."""
        single = (self.num_images, self.num_known, self.num_top1)
        own = np.concatenate([single, self.largest, self.any.ravel()])
        counts = np.array(team.total(own.tolist(), device), np.int64)
        self.num_images, self.num_known, self.num_top1 = counts[:3].tolist()
        by_level = counts[3:].reshape(-1, NUM_LEVELS)
        self.largest, self.any = by_level[0], by_level[1:]

    def results(self, common: dict[str, object]) -> list[Result]:
        chosen = self.settings
        common = {"convention": chosen.convention, **common}
        fixed = {
            "cam_threshold": chosen.cam_threshold,
            "iou_threshold": chosen.iou_threshold,
            "box": chosen.box,
            **common,
        }
        share = 100 / self.num_images
        tau, v1 = self._best(self.largest)
        common["threshold_step"] = chosen.threshold_step
        rows = zip(chosen.v2_iou_thresholds, self.any, strict=True)
        best = {delta: self._best(row) for delta, row in rows}
        v2 = sum(value for _, value in best.values()) / len(best)
        of_v1 = {"iou_threshold": chosen.iou_threshold, "tau": tau, **common}
        of_v2 = {
            "iou_thresholds": list(best),
            "tau": {str(delta): tau for delta, (tau, _) in best.items()},
            "boxacc": {str(delta): value for delta, (_, value) in best.items()},
            **common,
        }
        return [
            Result("localization", "top1_loc", share * self.num_top1, fixed),
            Result("localization", "gt_known_loc", share * self.num_known, fixed),
            Result("localization", "maxboxacc", v1, of_v1),
            Result("localization", "maxboxacc_v2", v2, of_v2),
        ]

    def _best(self, counts: NDArray[np.int64]) -> tuple[float, float]:
        """Return the first of the best thresholds and the percentage it gives."""
        taus = np.arange(0, 1, self.settings.threshold_step)
        by_tau = counts[[_level_of(tau) for tau in taus]]
        best = int(by_tau.argmax())
        return round(float(taus[best]), 6), 100 * int(by_tau[best]) / self.num_images


def _level_of(tau: float) -> int:
    """Return the level of the pixels above ``tau``: a map that has contours reaches 255."""
    return int(tau * 255) + 1


@dataclass(frozen=True, slots=True)
class Localized:
    """One image for a figure: the box of the predicted class, and the true boxes.

    ``box`` is None if the map is constant; ``iou`` is its best overlap with one of ``true_boxes``.
    ``heat`` is the map at the size of the image.
    """

    label: int
    predicted: int
    box: Box | None
    true_boxes: tuple[tuple[float, float, float, float], ...]
    iou: float
    heat: UInt8[np.ndarray, "h w"]


def localize(
    model: nn.Module,
    x: Float[Tensor, "b c h w"],
    y: Int[Tensor, " b"],
    boxes: Sequence[Tensor],
    settings: LocalizationSettings = DEFAULT,
) -> list[Localized]:
    """Return what ``top1_loc`` compares, per image: CAM of the predicted class, one box."""
    scan = Scan(model, boxes)
    return [_localized(image, settings) for image in scan.images([(x, y)], of_predicted=True)]


def _localized(image: HeatImage, settings: LocalizationSettings) -> Localized:
    found = _one_box(image, level_boxes(image.heat, image.order), settings)
    return Localized(
        label=image.label,
        predicted=image.predicted,
        box=found.box,
        true_boxes=tuple((a, b, c, d) for a, b, c, d in image.boxes.tolist()),
        iou=found.iou,
        heat=image.heat,
    )
