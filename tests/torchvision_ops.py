"""The two operators that torchvision's detectors need, in plain torch, where its own do not load.

Beside a torch that it was not built for, torchvision has no ``nms`` and no ``roi_align``. These
are written for clearness, not for speed; a torchvision that fits its torch is left alone.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from torchvision_schemas import define_torchvision_schemas

__all__ = ["nms", "patch_torchvision_ops", "roi_align"]

_ROI_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor"
)
_kept: list[torch.library.Library] = []  # a library takes its definitions along when collected


def patch_torchvision_ops(monkeypatch) -> None:
    """Make ``torchvision.ops.nms`` and ``roi_align`` work while ``monkeypatch`` lasts."""
    define_torchvision_schemas()
    if importlib.import_module("torchvision.extension")._has_ops():
        return
    if not _kept:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(_ROI_ALIGN)
        library.impl("nms", nms, "CPU")
        library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
        _kept.append(library)
    # By import_module: the function roi_align hides the module of that name in its package.
    boxes, roi = (importlib.import_module(f"torchvision.ops.{m}") for m in ("boxes", "roi_align"))
    monkeypatch.setattr(boxes, "_assert_has_ops", lambda: None)
    monkeypatch.setattr(roi, "_assert_has_ops", lambda: None)
    monkeypatch.setattr(roi, "_has_ops", lambda: True)


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Keep each box unless it overlaps one that was kept and scores higher."""
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    inner = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - torch.maximum(
        boxes[:, None, :2], boxes[None, :, :2]
    )
    both = inner.clamp(min=0).prod(dim=2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    overlaps = (both / (area[:, None] + area[None] - both) > iou_threshold).numpy()
    kept: list[int] = []
    is_out = torch.zeros(len(boxes), dtype=torch.bool).numpy()
    for i in range(len(boxes)):
        if not is_out[i]:
            kept.append(i)
            is_out |= overlaps[i]
    return order[torch.tensor(kept, dtype=torch.int64)]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Mean of ``sampling_ratio`` x ``sampling_ratio`` bilinear samples in each bin of each box.

    Samples outside the map by more than a pixel count zero, as they do there; nearer ones take the
    edge, for which ``grid_sample`` pads with it.
    """
    assert sampling_ratio > 0, "the detectors state how many samples they want"
    offset = 0.5 if aligned else 0.0
    corners = rois[:, 1:] * spatial_scale - offset
    size = corners[:, 2:] - corners[:, :2]
    size = size if aligned else size.clamp(min=1.0)
    height, width = input.shape[2:]
    xs = _samples(corners[:, 0], size[:, 0], pooled_width, sampling_ratio)
    ys = _samples(corners[:, 1], size[:, 1], pooled_height, sampling_ratio)
    # In pixels between the first and the last center, then in [-1, 1] for grid_sample.
    x = xs.clamp(0, width - 1)[:, None, :].expand(-1, ys.shape[1], -1)
    y = ys.clamp(0, height - 1)[:, :, None].expand(-1, -1, xs.shape[1])
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    is_near = ((xs >= -1) & (xs <= width))[:, None, :] & ((ys >= -1) & (ys <= height))[:, :, None]
    maps = input[rois[:, 0].long()]
    found = F.grid_sample(maps, grid, padding_mode="border", align_corners=False)
    found = found * is_near[:, None]
    shape = (len(rois), input.shape[1], pooled_height, sampling_ratio, pooled_width, sampling_ratio)
    return found.view(shape).mean(dim=(3, 5))


def _samples(start: Tensor, size: Tensor, num_bins: int, sampling_ratio: int) -> Tensor:
    n = num_bins * sampling_ratio
    places = (torch.arange(n, device=start.device, dtype=start.dtype) + 0.5) / n
    return start[:, None] + size[:, None] * places
