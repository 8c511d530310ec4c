"""AlignMixup (Venkataramanan et al. 2022): interpolate images, or features after alignment.

For each batch one case is drawn (paper, appendix A):

    input   lam x  + (1 - lam) x'
    feat    lam A  + (1 - lam) A~      A~: the partner's features on the anchor's positions
    feat'   lam A~'+ (1 - lam) A'      A~': the anchor's features on the partner's positions

with targets lam y + (1 - lam) y' in all of them, lam the share of the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.hooks import WrongOutput, check_rows, tap
from alignmixup.mixers.sampling import check_weights, probabilities, sample_pairs
from alignmixup.ops.align import align_mix
from alignmixup.ops.blend import (
    Loss,
    blend_with_partner,
    check_alpha,
    check_batch,
    check_case,
    check_loss,
    mixed_batch,
)
from alignmixup.ops.sinkhorn import Backend, Side, check_settings

__all__ = ["AlignMixup"]

CASES = ("input", "feat", "feat'")


@dataclass(frozen=True)
class AlignMixup(Mixer):
    """AlignMixup (Venkataramanan et al. 2022): mix images, or the aligned features of a layer.

    **Measure first whether alignment can matter on your model** with ``alignment_effect(model,
    layer, x)``. A plan with exact marginals keeps the mean over positions, so it cannot change the
    logits of a head that pools by the mean and classifies linearly. It can matter before a
    flattened head, at an earlier layer, or before anything else that is not linear in the mean.

    Args:
        layer: Name of a sub-module that returns maps ``[b, c, h, w]`` or tokens ``[b, n, c]``.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        eps: Strength of the entropic regularization.
        num_iters: Sinkhorn iterations; 0 is cross-attention, normalized once.
        tol: Stop the iterations of a pair at this marginal error; None runs all of them.
        weights: Relative probability of the cases ``"input"``, ``"feat"`` and ``"feat'"``; equal by
            default, as in the paper.
        aligned: False mixes position by position, without a transport plan.
        lam_per_sample: Draw one ``lam`` per sample, as in the paper's algorithm, instead of one per
            batch, as in the authors' code.
        resolution: Average maps down to this many rows and columns for mixing, then repeat the
            result back to the size of the map.
        last: The marginal of the plan that is exact; None chooses the one that keeps the mean over
            positions.
        backend: Solver of the transport problems; ``"auto"`` chooses by device.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.AlignMixup(layer="layer4", alpha=2.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    layer: str = "layer4"
    alpha: float = 2.0
    eps: float = 0.1
    num_iters: int = 100
    tol: float | None = None
    weights: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CASES, 1.0))
    aligned: bool = True
    lam_per_sample: bool = False
    resolution: int | None = None
    last: Side | None = None
    backend: Backend = "auto"
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_loss(self.loss)
        check_weights(self.weights, CASES)
        check_settings(self.eps, self.num_iters, self.tol, self.last or "columns")
        if self.resolution is not None and self.resolution < 1:
            raise ValueError(f"resolution must be at least 1, got {self.resolution}")

    @classmethod
    def released(cls, layer: str = "layer4") -> Self:
        """Return the settings of the authors' code.

        The input is mixed in half of the steps, and columns are exact in both directions.
        """
        return cls(layer, weights={"input": 2.0, "feat": 1.0, "feat'": 1.0}, last="columns")

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities(self.weights)

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        return sample_pairs(self.weights, self.alpha, self.lam_per_sample, batch_size, rng)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, CASES)
        is_input = draw.case == "input"
        if is_input:
            x = blend_with_partner(x, draw.perm, draw.lam)
        action = None if is_input else mix_features
        with tap(net, self.layer, action, self, draw.case, draw.perm, draw.lam):
            logits = net(x)
        return mixed_batch(logits, y, draw.perm, draw.lam, self.loss)


def mix_features(output: Tensor, mixer: AlignMixup, case: str, perm: Tensor, lam: Tensor) -> Tensor:
    """Mix a layer's output as ``case`` says."""
    if output.ndim not in (3, 4):
        raise WrongOutput(
            f"layer {mixer.layer!r} gives {list(output.shape)}; AlignMixup needs maps "
            "[b, c, h, w] or tokens [b, n, c]: name a layer that gives one of these"
        )
    check_rows(output, mixer.layer, len(perm))
    coarse = _to_resolution(output, mixer.resolution)
    if mixer.aligned:
        mixed = align_mix(
            coarse,
            perm,
            lam,
            keep="anchor" if case == "feat" else "partner",
            eps=mixer.eps,
            num_iters=mixer.num_iters,
            tol=mixer.tol,
            last=mixer.last,
            backend=mixer.backend,
        )
    else:
        mixed = blend_with_partner(coarse, perm, lam)
    return mixed if coarse is output else F.interpolate(mixed, output.shape[2:], mode="nearest")


def _to_resolution(output: Tensor, resolution: int | None) -> Tensor:
    if resolution is None:
        return output
    if output.ndim != 4 or output.shape[2] % resolution or output.shape[3] % resolution:
        raise ValueError(
            f"resolution {resolution} must divide the sides of a map, got {list(output.shape)}"
        )
    return F.adaptive_avg_pool2d(output, resolution)
