"""Plans that carry one image's features onto the positions of another, for the figure of poses.

Five plans: ``aligned`` (the transport plan between the features), ``unaligned`` (the identity), two
that know nothing of the images, ``random`` (a permutation of the positions) and ``uniform`` (every
position receives the mean of all), and ``oracle`` (transport between the true silhouettes), which
is what this encoder and decoder could show if features separated object from background.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignmixup.ops.align import from_positions, to_positions
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

Plan = Literal["aligned", "unaligned", "oracle", "random", "uniform"]
PLANS: tuple[Plan, ...] = ("aligned", "unaligned", "oracle", "random", "uniform")
# Coverages differ by 1 at most, so a plan between them is sharp at a smaller eps than features'.
ORACLE_EPS, ORACLE_ITERS = 1e-3, 500


def assignment(
    features: Tensor,
    perm: Int[Tensor, " b"],
    plan: Plan,
    masks: Bool[Tensor, "b y x"],
    *,
    eps: float = 0.1,
    num_iters: int = 100,
    seed: int = 0,
) -> Float[Tensor, "b r r"]:
    """R = r P of each anchor (rows) and its partner: how ``plan`` carries features over.

    Its columns sum to one, so all plans keep the mean over positions.
    """
    positions = to_positions(features).transpose(1, 2)
    b, _, r = positions.shape
    if plan == "aligned":
        cost = pairwise_cost(positions, positions[perm])
        return r * sinkhorn(cost, eps=eps, num_iters=num_iters).plan
    if plan == "oracle":
        cover = _coverage(masks, r)
        cost = (cover[:, :, None] - cover[perm][:, None, :]).square()
        plans = sinkhorn(cost, eps=ORACLE_EPS, num_iters=ORACLE_ITERS).plan
        return r * plans.to(features.dtype)
    one = torch.eye(r, device=features.device, dtype=features.dtype)
    if plan == "unaligned":
        return one.expand(b, r, r)
    if plan == "uniform":
        return torch.full_like(one, 1 / r).expand(b, r, r)
    if plan == "random":
        rng = torch.Generator().manual_seed(seed)
        return one[torch.rand(b, r, generator=rng).argsort(1).to(one.device)]
    raise ValueError(f"unknown plan {plan!r}; choose from {PLANS}")


def _coverage(masks: Bool[Tensor, "b y x"], r: int) -> Float[Tensor, "b r"]:
    """The share of each of a square map's r cells that the silhouette covers."""
    side = round(r**0.5)
    if side * side != r:
        raise ValueError(f"pose is measured on square maps, got {r} positions")
    return F.adaptive_avg_pool2d(masks[:, None].float(), side).flatten(1)


def carried(features: Tensor, perm: Int[Tensor, " b"], R: Float[Tensor, "b r r"]) -> Tensor:
    """A~: the partners' features on the anchors' positions."""
    return from_positions(R @ to_positions(features[perm]), features.shape)


def object_match(
    masks: Bool[Tensor, "b y x"], perm: Int[Tensor, " b"], R: Float[Tensor, "b r r"]
) -> float:
    """Whether objects are carried onto objects: no decoder is in this.

    The correlation over positions between the kept silhouette's coverage and that of the other,
    carried over by the plan; mean over the pairs.
    """
    cover = _coverage(masks, R.shape[-1]).to(R.dtype)
    moved = (R @ cover[perm][:, :, None])[:, :, 0]
    a, b = (c - c.mean(1, keepdim=True) for c in (cover, moved))
    return float(((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-6)).mean())
