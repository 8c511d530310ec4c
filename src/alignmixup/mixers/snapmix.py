"""SnapMix (Huang et al. 2021): CutMix between two boxes, labels by what a CAM holds in each.

    S_i = CAM of class y_i, resized to H x W, minus its minimum, over its sum
    box B2 of the partner is resized (bilinear, align_corners) to box B1 of the anchor
    t = rho_a y + rho_b y'      rho_a = 1 - S_i(B1), rho_b = S_perm[i](B2)

The shares need not sum to 1: a box may hold all that matters, or nothing. If a box is empty, the
anchor stays as it is, with the shares (1, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible, soft_cross_entropy, soft_targets
from alignmixup.hooks import tap
from alignmixup.mixers.attention import clean_map, find_classifier, normalized
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import BoxDraw, paste
from alignmixup.mixers.checks import image_size, require
from alignmixup.mixers.recursivemix import Bounds, box_bounds, inside
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.ops.blend import check_logits, without_autocast
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name


@dataclass(frozen=True, slots=True, eq=False)
class SnapDraw(BoxDraw):
    """A draw with two boxes: ``lam`` and center[0] in the anchor, ``lam2`` and center[1] in the
    partner; the area of a box is 1 - lam before clipping."""

    lam2: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class SnapMix(Method):
    """SnapMix (Huang et al. 2021): CutMix of two boxes, with labels by class activation maps.

    The network must end in average pooling of ``layer`` and the linear layer ``classifier``. Each
    step also runs it on the clean batch, without gradient. Targets need not sum to 1.

    Args:
        layer: Name of the layer whose output ``[b, c, h, w]`` is pooled.
        classifier: Name of the linear layer.
        alpha: The area of each box is 1 - lam with ``lam`` from Beta(alpha, alpha): 5 for
            fine-tuning, 1 from scratch.
        prob: Probability that a batch is mixed: 1 for fine-tuning, 0.5 from scratch.
        same_class: ``"once"`` counts both shares once where both images are of one class,
            ``"twice"`` is the authors' code.
        cam_mode: ``"eval"`` computes the maps in evaluation mode; ``"train"`` is the authors' code,
            where running statistics move twice per step.
        loss: ``"ce"``: binary cross-entropy needs targets that sum to 1.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.SnapMix(layer="layer4", classifier="head.linear")
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True
    has_clean = True

    layer: str = "layer4"
    classifier: str = "head.linear"
    alpha: float = 5.0
    prob: float = 1.0
    same_class: Literal["once", "twice"] = "once"
    cam_mode: Literal["eval", "train"] = "eval"
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        check_layer_name(self.classifier)
        if self.loss != "ce":
            raise ValueError(
                f"the targets of SnapMix need not sum to 1: loss must be 'ce', got {self.loss!r}"
            )

    @classmethod
    def released(cls, layer: str = "layer4", classifier: str = "head.linear") -> SnapMix:
        """Return the authors' code: shares of one class count twice, maps in training mode."""
        return cls(layer, classifier, same_class="twice", cam_mode="train")

    @classmethod
    def scratch(cls, layer: str = "layer4", classifier: str = "head.linear") -> SnapMix:
        """Return the settings for training from scratch."""
        return cls(layer, classifier, alpha=1.0, prob=0.5)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer,)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case, perm = sample_case(self.cases, rng), sample_perm(batch_size, rng)
        lam, lam2 = sample_share(self.alpha, 2, rng).unbind()
        return SnapDraw(case, perm, lam, center=sample_unit((2, 2), rng), lam2=lam2)

    def _clean(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        with tap(net, self.layer, None):  # in every case: torch.compile ignores later hooks
            return super()._clean(net, x, y, draw)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, size = require(draw, SnapDraw, self), image_size(x)
        features = clean_map(net, x, self.layer, training=self.cam_mode == "train")
        linear = find_classifier(net, self.classifier, self.layer, features)
        labels = soft_targets(y, linear.out_features)
        maps = class_maps(features, linear.weight.detach(), labels, size)
        own = box_bounds(draw.center[0], draw.lam, size)
        other = box_bounds(draw.center[1], draw.lam2, size)
        images, shares = snap(x, maps, draw.perm, own, other)
        logits = net(images)
        check_logits(logits, len(x))
        targets = snap_targets(labels, draw.perm, *shares, is_twice=self.same_class == "twice")
        return Mixed(logits, targets, {}, soft_cross_entropy)


@fusible
def class_maps(
    features: Float[Tensor, "b c n m"],
    weight: Float[Tensor, "k c"],
    labels: Float[Tensor, "b k"],
    size: tuple[int, int],
) -> Float[Tensor, "b h w"]:
    """Return relu(F) . w_y, resized, minus its minimum, over its sum; uniform where it is constant.

    The classifier's bias would shift a map by a constant, which the minimum takes away.
    """
    with without_autocast(features):
        dtype = torch.promote_types(features.dtype, torch.float32)
        chosen = labels.to(dtype) @ weight.to(dtype)
        maps = torch.einsum("bcnm,bc->bnm", features.to(dtype).relu(), chosen)
    maps = F.interpolate(maps.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)
    return normalized(maps - maps.amin((1, 2), keepdim=True))


@fusible
def snap(
    x: Float[Tensor, "b c h w"],
    maps: Float[Tensor, "b h w"],
    perm: Int[Tensor, " b"],
    own: tuple[Bounds, Bounds],
    other: tuple[Bounds, Bounds],
) -> tuple[Float[Tensor, "b c h w"], tuple[Float[Tensor, " b"], Float[Tensor, " b"]]]:
    """Return the mixed images, and the shares of anchor and partner in the label."""
    box, source = (
        inside(rows, x.shape[2]).unsqueeze(1) & inside(columns, x.shape[3])
        for rows, columns in (own, other)
    )
    is_mixed = box.any() & source.any()
    pasted = x[perm]
    for axis in (0, 1):
        pasted = _resized(pasted, 2 + axis, own[axis], other[axis])
    lost = torch.where(box & is_mixed, maps, 0).sum((1, 2))
    gained = torch.where(source & is_mixed, maps, 0).sum((1, 2))[perm]
    # The anchor is pasted into the copy: the result has its memory layout.
    return paste(pasted, x, ~(box & is_mixed)), (1 - lost, gained)


def _resized(images: Tensor, axis: int, own: Bounds, other: Bounds) -> Tensor:
    """Resize along one axis so that the bounds ``other`` fill ``own``: bilinear, align_corners."""
    side = images.shape[axis]
    position = torch.arange(side, device=images.device, dtype=own[0].dtype)
    last, others_last = own[1] - own[0] - 1, other[1] - other[0] - 1
    # The product first: boxes of one size give whole numbers, and pixels bit for bit.
    at = other[0] + (position - own[0]) * others_last / last.clamp(min=1)
    at = at.clamp(0, side - 1)
    low = at.floor()
    high = (low + 1).clamp(max=side - 1)
    shape = [1] * images.ndim
    shape[axis] = side
    share = (at - low).to(images.dtype).view(shape)
    one, two = (images.index_select(axis, i.long()) for i in (low, high))
    return torch.lerp(one, two, share)


@fusible
def snap_targets(
    labels: Float[Tensor, "b k"],
    perm: Int[Tensor, " b"],
    own: Float[Tensor, " b"],
    other: Float[Tensor, " b"],
    *,
    is_twice: bool,
) -> Float[Tensor, "b k"]:
    """Return rho_a y + rho_b y'; with ``is_twice`` doubled where y = y'."""
    partner = labels[perm]
    targets = own.unsqueeze(1).to(labels) * labels + other.unsqueeze(1).to(labels) * partner
    if is_twice:
        is_same = (labels == partner).all(1, keepdim=True)
        targets = torch.where(is_same, 2 * targets, targets)
    return targets
