"""Class activation maps as heat maps, image by image, each with the true boxes of its image.

A map is resized to its image (bicubic), scaled to [0, 1] by its minimum and maximum and rounded
down to bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup.contracts import Skipped
from alignmixup.evaluation.cam import PoolHead, class_maps, find_pool_head
from alignmixup.evaluation.forward import (
    ALONE,
    Batches,
    Normalization,
    check_labels,
    labeled_pixels,
    model_device,
)
from alignmixup.training.distributed import Team

Floats = NDArray[np.float64]


class HeatImage(NamedTuple):
    """One image for the metrics: its map, its true boxes, its label and the predicted class."""

    heat: UInt8[np.ndarray, "h w"]
    order: Float[np.ndarray, "h w"]
    boxes: Floats
    label: int
    predicted: int


@dataclass
class Scan:
    """The images of a set, one by one, each with a map.

    ``boxes`` are those of all images. Of several processes each scans its share, in a block of
    ``team.agreed``: all use the layers that are found on the first image with a box.
    """

    model: nn.Module
    boxes: Sequence[Tensor]
    layer: str | None = None
    classifier: str | None = None
    normalized_by: Normalization | None = None
    amp_dtype: torch.dtype | None = None
    team: Team = ALONE
    head: PoolHead | None = None

    def layers(self) -> dict[str, object]:
        head = self.head
        return {"layer": head and head.layer, "classifier": head and head.classifier}

    def images(self, batches: Batches, *, of_predicted: bool = False) -> Iterator[HeatImage]:
        """Yield each image that has a box, with the map of its true or of its predicted class."""
        check_boxes(self.boxes)
        team, number, device = self.team, 0, model_device(self.model)
        own = self.boxes[team.rows]
        if self._needs_head and team.rank != self._finder:
            self.head = team.from_rank(self._finder, None)
        for x, y in labeled_pixels(batches, self.normalized_by, device, team):
            truth = own[number : number + len(x)]
            if len(truth) < len(x):
                raise ValueError(
                    f"boxes are given for {len(self.boxes)} images, but there are more images; "
                    "one tensor [k, 4] is needed for each, in the order of the batches"
                )
            rows = [i for i in range(len(x)) if len(truth[i])]
            num_images = len(x)
            if len(rows) < num_images:
                x, y = x[rows], y[rows]
            maps = zip(*self._maps(x, y, of_predicted), strict=True) if rows else ()
            for k, (heat, order, predicted) in enumerate(maps):
                place = team.rank + team.size * (number + rows[k])
                checked = _checked_boxes(truth[rows[k]], place, heat.shape)
                yield HeatImage(heat, order, checked, int(y[k]), predicted)
            number += num_images
        if number != len(own):
            raise ValueError(f"{number} images, but boxes for {len(own)}")

    @property
    def _is_named(self) -> bool:
        return self.layer is not None or self.classifier is not None

    @property
    def _needs_head(self) -> bool:
        return self.head is None and (self._is_named or not hasattr(self.model, "class_maps"))

    @property
    def _finder(self) -> int:
        """The process that has the first image with a box; each, if no image has one."""
        firsts = (i % self.team.size for i, boxes in enumerate(self.boxes) if len(boxes))
        return next(firsts, self.team.rank)

    def _find_head(self, x: Tensor) -> PoolHead:
        names = {"layer": self.layer, "classifier": self.classifier}
        try:
            return find_pool_head(self.model, x, **names, normalized_by=self.normalized_by)
        except ValueError as error:
            if not self._is_named:
                raise Skipped(f"no class activation maps: {error}") from error
            if not hasattr(self.model, "class_maps"):
                raise
            raise ValueError(
                f"{error}; the network has maps of its own (class_maps), which are used if layer "
                "and classifier are left out"
            ) from error

    def _maps(
        self, x: Tensor, y: Tensor, of_predicted: bool
    ) -> tuple[UInt8[np.ndarray, "b h w"], Float[np.ndarray, "b h w"], list[int]]:
        if self._needs_head:
            self.head = self.team.from_rank(self._finder, self._find_head(x))
        found = class_maps(
            self.model,
            x,
            None if of_predicted else y,
            head=self.head,
            normalized_by=self.normalized_by,
            amp_dtype=self.amp_dtype,
        )
        check_labels(y, found.logits.shape[1])
        heat, order = heat_maps(found.maps, (x.shape[2], x.shape[3]))
        return heat, order, found.logits.argmax(dim=1).tolist()


def heat_maps(
    maps: Float[Tensor, "b i j"], size: tuple[int, int]
) -> tuple[UInt8[np.ndarray, "b h w"], Float[np.ndarray, "b h w"]]:
    """Return maps resized to the image, as bytes and as the floats that were rounded down.

    A map that varies only by rounding errors counts as constant and becomes zero.
    """
    maps = maps.float()
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    varies = high - low > 1e-6 * torch.maximum(low.abs(), high.abs())
    # Subtracting the minimum first loses less to rounding.
    large = F.interpolate((maps - low).unsqueeze(1), size, mode="bicubic").squeeze(1)
    low, high = large.amin(dim=(1, 2), keepdim=True), large.amax(dim=(1, 2), keepdim=True)
    unit = torch.where(varies, (large - low) / (high - low), torch.zeros_like(large))
    if not (maps.isfinite().all() and unit.isfinite().all()):
        raise ValueError("a class activation map is not finite; check the model's weights")
    order = unit.cpu().numpy()
    return (255 * order).astype(np.uint8), order


def check_boxes(boxes: Sequence[Tensor]) -> None:
    """Raise unless the boxes of each image are a tensor."""
    for number, of_image in enumerate(boxes):
        if not isinstance(of_image, Tensor):
            raise ValueError(
                f"image {number}: its boxes must be a tensor [k, 4], got {of_image!r}; "
                "torch.tensor([[x0, y0, x1, y1]]) makes one"
            )


def _checked_boxes(boxes: Tensor, number: int, shape: tuple[int, ...]) -> Floats:
    """Return the boxes of one image; raise if one is not inside the image."""
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(
            f"image {number}: its boxes must have shape [k, 4], got {list(boxes.shape)}"
        )
    x0, y0, x1, y1 = (found := boxes.double().cpu().numpy()).T
    h, w = shape
    slack = 1e-3  # boxes that were scaled to the image in float32
    is_inside = (x0 >= -slack) & (y0 >= -slack) & (x1 <= w + slack) & (y1 <= h + slack)
    is_good = is_inside & (x1 > x0) & (y1 > y0)
    if not is_good.all():
        raise ValueError(
            f"image {number}: the box {found[~is_good][0].tolist()} does not lie inside the image "
            f"of {w} x {h} pixels; boxes are x0, y0, x1, y1 in pixels of the images as given, "
            "ends exclusive: scale them with the images"
        )
    return found
