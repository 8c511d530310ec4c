"""How much does alignment change, on this model and at this layer?

An exact plan keeps the mean over positions (see ``align``), so before average pooling and a linear
layer alignment changes the features and nothing after them. This measures it on the user's own
model, before GPU time is spent on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignmixup.hooks import check_rows, find_layer, plain_module, tap
from alignmixup.ops.align import Keep, align_mix, to_positions
from alignmixup.ops.blend import blend, check_images, check_logits
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import Side, sinkhorn

__all__ = ["NEXT_TO_NOTHING", "Effect", "alignment_effect"]

NEXT_TO_NOTHING = 1e-3


@dataclass(frozen=True, slots=True)
class Effect:
    """How much alignment changes at one layer, each as |aligned - unaligned| / |unaligned|.

    Args:
        layer: Name of the layer.
        features: Relative change of the features.
        pooled: Relative change of their mean over positions.
        logits: Relative change of the logits.
        plan_entropy: 0 for a one-to-one matching, 1 for a plan that matches nothing.
        marginal_error: Distance of the plan's marginals from uniform, mean over the batch.

    Example:
        ```python
        effect = am.alignment_effect(model, "layer3", x)
        if effect.is_next_to_nothing:
            print("choose an earlier layer:", effect)
        ```
    """

    layer: str
    features: float
    pooled: float
    logits: float
    plan_entropy: float
    marginal_error: float

    @property
    def is_next_to_nothing(self) -> bool:
        """Whether the logits change by less than 0.1 %."""
        return self.logits < NEXT_TO_NOTHING

    def __str__(self) -> str:
        verdict = ", which is next to nothing" if self.is_next_to_nothing else ""
        return (
            f"alignment at {self.layer} changes the features by {self.features:.2%}, their mean "
            f"over positions by {self.pooled:.2g} and the logits by {self.logits:.2g}{verdict}"
        )


@torch.no_grad()
def alignment_effect(
    model: nn.Module,
    layer: str,
    x: Tensor,
    *,
    keep: Keep = "anchor",
    lam: float = 0.5,
    eps: float = 0.1,
    num_iters: int = 100,
    last: Side | None = None,
) -> Effect:
    """Measure how much alignment changes on a model: mix a batch with and without it and compare.

    Each sample is mixed with the next one. The model runs in evaluation mode without gradients and
    is left unchanged; wrappers (``torch.compile``, DistributedDataParallel) are bypassed.

    Args:
        model: Any module that returns logits.
        layer: Name of a sub-module that returns maps ``[b, c, h, w]`` or tokens ``[b, n, c]``.
        x: Images, two or more.
        keep: Whose positions are kept, ``"anchor"`` or ``"partner"``.
        lam: Share of the anchor.
        eps: Strength of the entropic regularization.
        num_iters: Sinkhorn iterations.
        last: The marginal of the plan that is exact; None: the one that keeps the mean.

    Returns:
        The relative change of features, pooled features and logits; ``print`` shows a sentence.

    Raises:
        ValueError: If the batch has one sample, or the layer does not exist or has another shape.

    Example:
        ```python
        print(am.alignment_effect(model, "layer4", x))
        ```
    """
    if len(x) < 2:
        raise ValueError(f"alignment needs two samples or more, got a batch of {len(x)}")
    check_images(x)
    net = plain_module(model)
    find_layer(net, layer)
    perm = torch.arange(len(x), device=x.device).roll(1)
    share = torch.tensor(lam, device=x.device, dtype=torch.float64)
    seen: list[Tensor] = []

    def aligned(output: Tensor) -> Tensor:
        check_rows(output, layer, len(x))
        seen.append(output)
        seen.append(
            align_mix(output, perm, share, keep=keep, eps=eps, num_iters=num_iters, last=last)
        )
        return seen[-1]

    def unaligned(output: Tensor) -> Tensor:
        seen.append(blend(output, output[perm], share))
        return seen[-1]

    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        # A module that has compiled itself and run would not see a tap that comes now.
        with torch.compiler.set_stance("force_eager"):
            with tap(net, layer, aligned):
                logits = net(x)
            with tap(net, layer, unaligned):
                plain_logits = net(x)
        check_logits(logits, len(x))
    finally:
        for module, mode in modes.items():
            module.training = mode
    output, with_plan, without = (to_positions(t).double() for t in seen)
    # The side align_mix makes exact: without iterations it is the other one.
    side: Side = last or ("columns" if (keep == "anchor") == (num_iters > 0) else "rows")
    cost = pairwise_cost(output.transpose(1, 2), output[perm].transpose(1, 2))
    transport = sinkhorn(cost, eps=eps, num_iters=num_iters, last=side)
    r = output.shape[1]
    return Effect(
        layer=layer,
        features=_change(with_plan, without),
        pooled=_change(with_plan.mean(1), without.mean(1)),
        logits=_change(logits.double(), plain_logits.double()),
        plan_entropy=float(transport.entropy.mean() / math.log(r) - 1) if r > 1 else 0.0,
        marginal_error=float(transport.marginal_error.mean()),
    )


def _change(aligned: Tensor, unaligned: Tensor) -> float:
    scale = float(unaligned.norm())
    return float((aligned - unaligned).norm()) / scale if scale else 0.0
