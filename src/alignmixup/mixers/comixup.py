"""Co-Mixup (Kim et al. 2021): mix many inputs into many outputs, salient and diverse.

The batch is split into parts of consecutive samples. Within a part, each block of each output shows
one input, or halves of two, so as to minimize

    F(z) = saliency lost + beta * edges between inputs + gamma * overlap of the outputs' inputs

(``ops/joint.py`` has the full definition). The label of an output is the share of each input in it.
There are no anchors and partners: ``perm`` and ``lam`` of a draw are not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import LOSSES, Loss, Method
from alignmixup.mixers.checks import check_grids, check_integers, check_nonnegative, require
from alignmixup.mixers.pixels import Scale
from alignmixup.mixers.sampling import clean_draw, sample_case, sample_parts, sample_unit
from alignmixup.ops.backend import Backend
from alignmixup.ops.gradient_saliency import block_saliency, gradient_saliency
from alignmixup.ops.joint import JointCosts, Penalty, assign_blocks
from alignmixup.registry import register_mixer


@dataclass(frozen=True, slots=True, eq=False)
class CoDraw(Draw):
    """A draw with a Dirichlet prior over the inputs of each part, and random initial labels.

    ``start`` holds fractions: the initial label of a block is floor(fraction * inputs).
    """

    prior: Float[Tensor, " b"]
    start: Float[Tensor, "r b n n"]


@register_mixer
@dataclass(frozen=True)
class CoMixup(Method):
    """Co-Mixup (Kim et al. 2021): mix many inputs into many outputs, salient and diverse.

    The batch is split into parts of consecutive samples; a part of one sample is not mixed. Within
    a part each block of each output shows one input, or halves of two, and the label is the share
    of each input. The defaults are the paper's. ``perm`` and ``lam`` of a draw are not used.

    Args:
        alpha: Concentration of the Dirichlet prior over the inputs of a part.
        part_size: Number of samples mixed together; the last part may be smaller.
        grids: Numbers of blocks along a side, one drawn per batch; each must divide the image side.
        beta: Weight of equal neighbors.
        gamma: Weight of the penalty on inputs that other outputs also show.
        eta: Weight of the prior.
        omega: Share of the distance between salient places in the compatibility of two inputs.
        threshold: Blocks, as a share of an image, that an input may have in the other outputs
            before the penalty applies.
        penalty: ``"hard"`` counts all of those blocks then, ``"soft"`` those above the threshold.
        compat_size: Side of the window whose place of highest saliency decides compatibility.
        compat_stride: Stride of that window; 8 on ImageNet.
        num_iters: Iterations over all outputs.
        num_sweeps: Sweeps of the cut of one output.
        num_restarts: Initial assignments, optimized in parallel; the best result is used. 1 is the
            authors' search.
        half_labels: Let blocks show halves of two inputs.
        resolve_ties: Penalize outputs that show the same set of inputs.
        clean_lam: Weight of the loss on the clean batch, whose forward pass the saliency needs
            anyway.
        saliency_std: For images in [0, 1] and a network that divides by it: take the saliency of
            the normalized input, as the authors' code does.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        backend: ``"auto"`` uses one fused kernel on a GPU and ``"reference"`` elsewhere.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.CoMixup(part_size=8, num_restarts=2)
        mixer(model, x, y).loss().backward()
        ```
    """

    alpha: float = 2.0
    part_size: int = 20
    grids: tuple[int, ...] = (4,)
    beta: float = 0.32
    gamma: float = 1.0
    eta: float = 0.05
    omega: float = 0.001
    threshold: float = 0.83
    penalty: Penalty = "hard"
    compat_size: int = 8
    compat_stride: int = 1
    num_iters: int = 4
    num_sweeps: int = 2
    num_restarts: int = 16
    half_labels: bool = True
    resolve_ties: bool = True
    clean_lam: float = 1.0
    saliency_std: Scale = None
    loss: Loss = "bce"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grids(self.grids, least=1)
        check_nonnegative(self, "clean_lam", "beta", "gamma", "eta", "threshold")
        check_integers(self, 1, "part_size", "compat_size", "compat_stride")
        check_integers(self, 1, "num_iters", "num_sweeps", "num_restarts")

    @property
    def cases(self) -> Mapping[str, float]:
        return {str(n): 1 / len(self.grids) for n in self.grids}

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case = sample_case(self.cases, rng)
        prior = sample_parts(self.alpha, batch_size, self.part_size, rng)
        start = sample_unit((self.num_restarts, batch_size, int(case), int(case)), rng)
        clean = clean_draw(batch_size, rng)
        return CoDraw(case, clean.perm, clean.lam, prior, start)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, CoDraw, self)
        for n in self.grids:  # check all grids in the first step, whichever is drawn
            self._check_size(x, n)
        saliency = gradient_saliency(
            net, x, y, clean_lam=self.clean_lam, loss=self.loss, std=self.saliency_std
        )
        with torch.no_grad():
            shares = self.shares(saliency.maps, draw)
        logits = net(mix_blocks(x, shares, self.part_size))
        rows = self._rows(y, logits.shape[1])
        targets = mix_labels(rows, shares, self.part_size)
        return Mixed(logits, targets, saliency.extra, LOSSES[self.loss])

    def shares(self, maps: Float[Tensor, "b h w"], draw: CoDraw) -> Float[Tensor, "p N s N"]:
        """Return the share of each input of a part in each block of each output."""
        b, n = len(maps), int(draw.case)
        parts = _Parts.of(b, self.part_size)
        is_real = parts.split(torch.ones(b, dtype=torch.bool, device=maps.device))
        blocks = block_saliency(maps, maps.shape[-1] // n).flatten(1)
        prior = torch.log(draw.prior.to(blocks.dtype) + 1e-8) * (self.eta / n**2)
        costs = JointCosts(
            parts.split(-blocks - prior.unsqueeze(1)),
            self._compatibility(parts.split(self._peaks(maps)), is_real),
            is_real,
            beta=self.beta / n**2,
            gamma=self.gamma / n**2,
            tau=self.threshold * n**2,
            penalty=self.penalty,
        )
        fractions = parts.split(draw.start.flatten(2).transpose(0, 1)).permute(2, 0, 1, 3)
        start = (fractions * is_real.sum(1).view(-1, 1, 1)).long()
        return assign_blocks(
            costs,
            start,
            num_iters=self.num_iters,
            num_sweeps=self.num_sweeps,
            half_labels=self.half_labels,
            resolve_ties=self.resolve_ties,
            backend=self.backend,
        ).shares

    def _peaks(self, maps: Float[Tensor, "b h w"]) -> Float[Tensor, "b 2"]:
        """Return row and column of the most salient window."""
        size = min(self.compat_size, *maps.shape[1:])
        windows = F.avg_pool2d(maps.unsqueeze(1), size, self.compat_stride).squeeze(1)
        peak = windows.flatten(1).max(1).indices
        columns = windows.shape[2]
        return torch.stack([peak // columns, peak % columns], dim=1).to(maps.dtype)

    def _compatibility(
        self, peaks: Float[Tensor, "p N 2"], is_real: Tensor
    ) -> Float[Tensor, "p N N"]:
        """Return A: 1 - omega on the diagonal, plus omega times the normalized peak distances."""
        distance = (peaks.unsqueeze(1) - peaks.unsqueeze(2)).abs().sum(3)
        distance = distance * (is_real.unsqueeze(1) & is_real.unsqueeze(2))
        total = distance.sum((1, 2), keepdim=True).clamp_min(1e-12)  # equal peaks
        counted = is_real.to(peaks.dtype)
        scale = self.omega * counted.sum(1).view(-1, 1, 1) / total
        return torch.diag_embed((1 - self.omega) * counted) + scale * distance

    def _check_size(self, x: Tensor, n: int) -> None:
        if x.ndim != 4 or x.shape[2] != x.shape[3] or x.shape[2] % n:
            raise ValueError(
                f"Co-Mixup needs square images divisible into {n} blocks per side, got "
                f"{list(x.shape)}: choose other grids than {self.grids}"
            )


def mix_blocks(
    x: Float[Tensor, "b c h h"], shares: Float[Tensor, "p N s N"], part_size: int
) -> Float[Tensor, "b c h h"]:
    """Compose the outputs: each block shows one input, or the mean of two."""
    b, c, side, _ = x.shape
    parts = _Parts.of(b, part_size)
    n = math.isqrt(shares.shape[2])
    block = side // n
    tiles = x.reshape(b, c, n, block, n, block).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    # A gather: a matrix product would round the pixels under tf32 or autocast.
    top = shares.topk(2, dim=3)
    source = parts.join(top.indices + parts.offsets(x.device))
    weight = parts.join(top.values)[..., 0].view(b, -1, 1, 1, 1)
    place = torch.arange(n * n, device=x.device)
    first, second = (tiles[source[..., k].clamp_max(b - 1), place] for k in range(2))
    dtype = torch.promote_types(x.dtype, torch.float32)
    mixed = torch.lerp(second.to(dtype), first.to(dtype), weight.to(dtype))
    mixed = mixed.view(b, n, n, c, block, block).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
    return torch.empty_like(x).copy_(mixed)  # keeps channels_last


def mix_labels(
    y: Float[Tensor, "b k"], shares: Float[Tensor, "p N s N"], part_size: int
) -> Float[Tensor, "b k"]:
    """Mix the labels by the shares of the pixels."""
    parts = _Parts.of(len(y), part_size)
    shown = shares.mean(2).to(y.dtype)
    return parts.join((shown.unsqueeze(3) * parts.split(y).unsqueeze(1)).sum(2))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Split of a batch into parts of ``size`` consecutive samples, padded to ``width``."""

    batch_size: int
    size: int
    width: int

    @classmethod
    def of(cls, batch_size: int, part_size: int) -> _Parts:
        size = min(part_size, batch_size)
        return cls(batch_size, size, max(size, 3))  # half labels need three inputs

    @property
    def count(self) -> int:
        return -(-self.batch_size // self.size)

    def split(self, batch: Shaped[Tensor, "b *rest"]) -> Shaped[Tensor, "p N *rest"]:
        """Return the samples by part, padded with zeros."""
        full = batch.new_zeros(self.count * self.size, *batch.shape[1:])
        full[: self.batch_size] = batch
        parts = batch.new_zeros(self.count, self.width, *batch.shape[1:])
        parts[:, : self.size] = full.view(self.count, self.size, *batch.shape[1:])
        return parts

    def join(self, parts: Shaped[Tensor, "p N *rest"]) -> Shaped[Tensor, "b *rest"]:
        """Undo ``split``."""
        return parts[:, : self.size].flatten(0, 1)[: self.batch_size]

    def offsets(self, device: torch.device) -> Int[Tensor, "p 1 1 1"]:
        """Return the index in the batch of the first sample of each part."""
        return torch.arange(self.count, device=device).view(-1, 1, 1, 1) * self.size
