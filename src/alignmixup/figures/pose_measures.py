"""Does pose follow the image whose positions are kept, and appearance the other? Measured.

The paper shows it in pictures. On the built-in shapes the silhouette and the colors of every image
are known, so decoded mixes can be measured against them:

    overlap     of the decoded image's own silhouette with the true one of either image (IoU)
    color      s = <c - c_kept, c_other - c_kept> / |c_other - c_kept|^2, c the mean color inside
                (outside) that silhouette: 0 the kept image's, 1 the other's; sums over all pairs

Without alignment a mix whose kept share is 0 is simply the other image: its appearance and its pose
as well. So what is compared is the whole way from one image to the other: how much of the pose is
kept where the appearance has become the other's. Both are put on the scale of what this decoder
makes of the two images themselves, which is where every way begins and the unaligned one ends:

    pose        (overlap with kept - that of the other image) / (that of the kept image - ...)
    appearance  likewise from the colors, foreground and background together

The plans that carry features over are those of ``pose_plans``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.contracts import Result
from alignmixup.datasets import ShapesDrawing
from alignmixup.experiments.painters import Painter
from alignmixup.figures.pose_plans import PLANS, Plan, assignment, carried, object_match
from alignmixup.figures.sources import different_pairs
from alignmixup.ops.blend import blend

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class PosePoint:
    """What became of pose and appearance at one share of the kept image, means over all pairs.

    ``swapped`` is how often the decoded foreground is nearer to the other's background than to the
    other's foreground; ``object_match`` is a property of the plan, the same at every share.
    """

    plan: Plan
    kept_share: float
    overlap_kept: float
    overlap_other: float
    other_foreground: float
    other_background: float
    swapped: float
    object_match: float
    pose: float = math.nan  # on the scale of all points
    appearance: float = math.nan

    @property
    def color(self) -> float:
        return (self.other_foreground + self.other_background) / 2


def silhouettes(images: Float[Tensor, "n 3 h w"]) -> Bool[Tensor, "n h w"]:
    """The object in each image, found without knowing what was drawn.

    Shapes never touch the border, so the border's median color is the background's; what is
    farther from it than the threshold of Otsu (the split of largest variance between the two sides)
    is the object. A constant image has none.
    """
    rim = torch.ones_like(images[0, 0], dtype=torch.bool)
    rim[1:-1, 1:-1] = False
    background = images[:, :, rim].median(dim=2).values
    distance = (images - background[:, :, None, None]).norm(dim=1)
    values = distance.flatten(1).sort(dim=1).values.double()
    n = values.shape[1]
    below = torch.arange(1, n, device=values.device, dtype=values.dtype)
    total = values.sum(1, keepdim=True)
    sums = values.cumsum(1)[:, :-1]
    between = below * (n - below) * (sums / below - (total - sums) / (n - below)).square()
    threshold = values.gather(1, between.argmax(1, keepdim=True))
    is_object: Tensor = distance > threshold[:, :, None].to(distance.dtype)
    return is_object


def overlap(a: Bool[Tensor, "n h w"], b: Bool[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """Intersection over union; 0 where both are empty."""
    union = (a | b).sum((1, 2))
    return (a & b).sum((1, 2)) / union.clamp(min=1)


def region_colors(
    images: Float[Tensor, "n 3 h w"], masks: Bool[Tensor, "n h w"]
) -> Float[Tensor, "n 2 3"]:
    """Mean color inside and outside each mask; of the whole image where a side is empty."""
    sides = torch.stack([masks, ~masks], dim=1)
    empty = ~sides.flatten(2).any(2)
    weights = (sides | empty[:, :, None, None]).to(images.dtype)
    sums = torch.einsum("nchw,nshw->nsc", images, weights)
    return sums / weights.sum((2, 3))[:, :, None]


def other_color(
    color: Float[Tensor, "n 3"], kept: Float[Tensor, "n 3"], other: Float[Tensor, "n 3"]
) -> float:
    """How far colors have gone from the kept images' (0) to the others' (1), over all pairs."""
    way = other - kept
    return float(((color - kept) * way).sum() / way.square().sum().clamp(min=1e-12))


@torch.no_grad()
def pose_points(
    painter: Painter,
    drawing: ShapesDrawing,
    *,
    num_pairs: int = 250,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    eps: float = 0.1,
    num_iters: int = 100,
) -> list[PosePoint]:
    """Decode mixes of pairs of shapes and measure them against the truth.

    Each pair is mixed twice, each image being the kept one once: keeping the partner's positions is
    keeping the anchor's with the two exchanged.
    """
    pairs = different_pairs(drawing.image_set, num_pairs, seed)
    device = next(painter.net.parameters()).device
    chosen = [*(i for i, _ in pairs), *(j for _, j in pairs)]
    x = drawing.image_set.images[chosen].to(device) / 255
    masks = drawing.truth.masks[chosen].to(device)
    colors = region_colors(x, masks)
    features = painter.features(x)
    perm = torch.arange(len(x), device=device).roll(len(pairs))
    raw = {}
    for plan in PLANS:
        R = assignment(features, perm, plan, masks, eps=eps, num_iters=num_iters, seed=seed)
        moved, match = carried(features, perm, R), object_match(masks, perm, R)
        for share in sorted({0.0, 1.0, *shares}):
            mixed = blend(features, moved, torch.tensor(share))
            measured = _measure(painter.paint(mixed), masks, colors, perm)
            raw[plan, share] = PosePoint(plan, share, **measured, object_match=match)
    # What this decoder makes of the kept image, and of the other one.
    begin, end = raw["unaligned", 1.0], raw["unaligned", 0.0]
    return [
        replace(
            found,
            pose=_between(found.overlap_kept, end.overlap_kept, begin.overlap_kept),
            appearance=_between(found.color, begin.color, end.color),
        )
        for found in raw.values()
        if found.kept_share in shares
    ]


def _measure(
    painted: Float[Tensor, "n 3 h w"],
    masks: Bool[Tensor, "n h w"],
    colors: Float[Tensor, "n 2 3"],
    perm: Int[Tensor, " n"],
) -> dict[str, float]:
    """The part of a point that needs no scale."""
    painted = painted.clamp(0, 1)
    found = silhouettes(painted)
    seen = region_colors(painted, found)
    theirs = colors[perm]
    foreground = seen[:, 0]
    is_swapped = (foreground - theirs[:, 1]).norm(dim=1) < (foreground - theirs[:, 0]).norm(dim=1)
    return {
        "overlap_kept": float(overlap(found, masks).mean()),
        "overlap_other": float(overlap(found, masks[perm]).mean()),
        "other_foreground": other_color(foreground, colors[:, 0], theirs[:, 0]),
        "other_background": other_color(seen[:, 1], colors[:, 1], theirs[:, 1]),
        "swapped": float(is_swapped.float().mean()),
    }


def _between(value: float, low: float, high: float) -> float:
    """Where a value lies on the way from ``low`` (0) to ``high`` (1)."""
    return (value - low) / (high - low) if high != low else 0.0


def pose_at_half(points: Sequence[PosePoint], plan: Plan) -> float:
    """How much of the pose is left where the appearance is half-way, on the way of ``plan``.

    Between two shares a straight line; NaN where the appearance never gets that far.
    """
    way = sorted((p for p in points if p.plan == plan), key=lambda p: -p.kept_share)
    for before, after in itertools.pairwise(way):
        if before.appearance <= 0.5 <= after.appearance:
            part = _between(0.5, before.appearance, after.appearance)
            return before.pose + part * (after.pose - before.pose)
    return math.nan


def pose_results(points: Sequence[PosePoint], settings: Mapping[str, object]) -> list[Result]:
    """The points as results, one a number; the settings say at which plan and share."""
    results = []
    for point in points:
        values = asdict(point)
        where = {key: values.pop(key) for key in ("plan", "kept_share")}
        results += [
            Result("pose", key, value, {**where, **settings}) for key, value in values.items()
        ]
    for plan in PLANS:
        value = pose_at_half(points, plan)
        if not math.isnan(value):  # JSON has none
            results.append(Result("pose", "pose_at_half", value, {"plan": plan, **settings}))
    return results
