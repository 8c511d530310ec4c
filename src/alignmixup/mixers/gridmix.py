"""GridMix, two methods of one name: a grid of holes, or of cells.

holes (GridMixup, Dobrynin; what tables of other papers call GridMix): in a random crop of area
share A ~ U(1/2, 1) and aspect q ~ U(1/2, 2), a lattice of nx ~ U{2..6} squares of pw pixels across,
each with a hole of pw sqrt(1 - lam0) pixels that shows the partner.

cells (Baek, Bang, Shim 2021): an n x n grid, each cell from one of the two images; lam is the share
of cells of the anchor. A second linear layer f reads the mean feature of each cell and predicts the
label of the image that the cell is from:

    L = CE(z, t) + w mean_cells CE(f(h_cell), y_cell)

Labels are mixed by area, which is exact in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.hooks import peek
from alignmixup.mixers.base import LOSSES, Loss
from alignmixup.mixers.boxes import paste_partner
from alignmixup.mixers.checks import check_integers, check_nonnegative, image_size, require
from alignmixup.mixers.layouts import channels_first
from alignmixup.mixers.sampling import sample_perm, sample_share, sample_unit
from alignmixup.mixers.stateful import Stateful, probe
from alignmixup.ops.blend import without_autocast
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name

Grid = Literal["holes", "cells"]
LEAST, MOST = 2, 6  # squares across the crop
LAM = {"holes": (0.1, 0.9), "cells": (0.0, 1.0)}  # the uniform shares where alpha is None


@dataclass(frozen=True, slots=True, eq=False)
class HolesDraw(Draw):
    """A draw with five numbers in [0, 1): area, aspect, column and row of the crop; squares."""

    crop: Float[Tensor, " 5"]


@dataclass(frozen=True, slots=True, eq=False)
class CellsDraw(Draw):
    """A draw with a random order of the cells."""

    order: Int[Tensor, " cells"]


@register_mixer
@dataclass(frozen=True)
class GridMix(Stateful):
    """GridMix: show the partner in a grid of holes or of cells; labels by area.

    There is one grid per batch.

    Args:
        grid: ``"holes"`` is GridMixup (Dobrynin), which tables of other papers call GridMix;
            ``"cells"`` is GridMix (Baek et al. 2021).
        alpha: ``lam`` is drawn from Beta(alpha, alpha); None: uniformly, from 0.1 to 0.9 for holes,
            as the author does, and from 0 to 1 for cells.
        num_cells: Cells along a side, for ``grid="cells"``.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        local_weight: Weight of the local loss of cells; 0 is without, and needs no ``attach``.
        layer: Layer whose output ``[b, c, h, w]`` the local loss reads: the last map.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.GridMix(grid="cells", num_cells=4)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True

    grid: Grid = "holes"
    alpha: float | None = None
    num_cells: int = 4
    loss: Loss = "ce"
    local_weight: float = 0.0
    layer: str = "layer4"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 1, "num_cells")
        check_layer_name(self.layer)
        check_nonnegative(self, "local_weight")
        if self.local_weight and self.grid != "cells":
            raise ValueError(
                f"local_weight={self.local_weight} is for grid='cells', got grid={self.grid!r}"
            )

    @classmethod
    def openmixup(cls) -> GridMix:
        """Return OpenMixup's settings on CIFAR: holes with alpha = 0.2.

        Its defect is not repeated: there, and in the author's code, a crop that is larger than the
        image loses holes or shows them at the opposite side.
        """
        return cls(alpha=0.2)

    @property
    def has_module(self) -> bool:
        return self.local_weight > 0

    @property
    def needs_network(self) -> bool:
        return self.has_module

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer,) if self.has_module else ()

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm = sample_perm(batch_size, rng)
        if self.alpha is None:
            low, high = LAM[self.grid]
            lam = low + (high - low) * sample_unit((), rng)
        else:
            lam = sample_share(self.alpha, None, rng)
        if self.grid == "holes":
            return HolesDraw("cut", perm, lam, sample_unit((5,), rng))
        return CellsDraw("cut", perm, lam, sample_perm(self.num_cells**2, rng))

    def _build(self, net: nn.Module, x: Tensor) -> nn.Module:
        output, logits = probe(net, x, self.layer)
        features = channels_first(net, self.layer, output, x)
        if features.ndim != 4:
            raise ValueError(
                f"layer {self.layer!r} returns {list(features.shape)}; the local loss of GridMix "
                "needs maps [b, c, h, w]: choose a layer that returns them"
            )
        return LocalHead(features.shape[1], logits)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if self.grid == "holes":
            mask = holes(require(draw, HolesDraw, self).crop, draw.lam, image_size(x))
            mixed, lam = paste_partner(x, draw.perm, mask)
            return self._mixed(net(mixed), y, draw, lam)
        order = require(draw, CellsDraw, self).order
        if len(order) != self.num_cells**2:
            raise ValueError(
                f"the draw is for {len(order)} cells, but this mixer has {self.num_cells**2}: "
                "use its own draw()"
            )
        mask = cells(order, draw.lam, self.num_cells, image_size(x))
        mixed, lam = paste_partner(x, draw.perm, mask)
        if self.module is None:
            return self._mixed(net(mixed), y, draw, lam)
        with peek(net, self.layer) as peeked:
            logits = net(mixed)
        features = channels_first(net, self.layer, peeked.output, x)
        local = self.module(cell_means(features, self.num_cells))
        rows = self._rows(y, local.shape[2])
        is_partner = partner_cells(order, draw.lam).view(-1, 1)
        targets = torch.where(is_partner, rows[draw.perm].unsqueeze(1), rows.unsqueeze(1))
        loss = LOSSES[self.loss](local.flatten(0, 1), targets.flatten(0, 1))
        return self._mixed(logits, y, draw, lam, {"local": self.local_weight * loss})


class LocalHead(nn.Module):
    """The second classifier, which reads cells."""

    def __init__(self, num_channels: int, logits: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(num_channels, logits.shape[1], dtype=logits.dtype)

    def forward(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n k"]:
        logits: Tensor = self.head(features.to(self.head.weight.dtype))
        return logits


@fusible
def holes(
    crop: Float[Tensor, " 5"], lam: Float[Tensor, ""], size: tuple[int, int]
) -> Bool[Tensor, "h w"]:
    """Return the lattice of holes in the crop; empty for lam = 1, else a hole is >= 1 pixel.

    A crop may be larger than the image; the lattice is then clipped at the border.
    """
    height, width = size
    area, aspect = (height * width * (0.5 + crop[0] / 2)).floor(), 0.5 + 1.5 * crop[1]
    across = (area / aspect).sqrt().floor()
    down = (across * aspect).floor()
    left, top = ((width - across) * crop[2]).trunc(), ((height - down) * crop[3]).trunc()
    pitch = (across / (LEAST + (crop[4] * (MOST - LEAST + 1)).floor())).ceil().clamp(min=1)
    hole = (pitch * (1 - lam).sqrt()).floor().clamp(min=1).minimum(pitch - 1)
    in_rows = _lattice(height, top, down, pitch, hole)
    return in_rows.unsqueeze(-1) & _lattice(width, left, across, pitch, hole) & (lam < 1)


def _lattice(
    side: int, begin: Tensor, length: Tensor, pitch: Tensor, hole: Tensor
) -> Bool[Tensor, " n"]:
    at = torch.arange(side, device=begin.device, dtype=begin.dtype) - begin
    return (at >= 0) & (at < length) & (at.remainder(pitch) < hole)


@fusible
def cells(
    order: Int[Tensor, " cells"], lam: Float[Tensor, ""], num_cells: int, size: tuple[int, int]
) -> Bool[Tensor, "h w"]:
    """Return the pixels of the partner's cells of an n x n grid."""
    is_partner = partner_cells(order, lam).view(num_cells, num_cells)
    rows, columns = (torch.arange(side, device=order.device) * num_cells // side for side in size)
    return is_partner[rows][:, columns]


def partner_cells(order: Int[Tensor, " cells"], lam: Float[Tensor, ""]) -> Bool[Tensor, " cells"]:
    """Return which cells are the partner's: the last of ``order``, to the nearest number."""
    return order.argsort() >= (lam * len(order)).round()


def cell_means(features: Float[Tensor, "b c h w"], num_cells: int) -> Float[Tensor, "b n c"]:
    """Return the mean feature of each cell; a position on a border counts by its parts."""
    wide = features if features.dtype == torch.float64 else features.float()
    with without_autocast(features):
        weights = [_shares(side, num_cells, wide) for side in features.shape[2:]]
        return torch.einsum("bchw,rh,sw->brsc", wide, *weights).flatten(1, 2)


def _shares(side: int, num_cells: int, like: Tensor) -> Float[Tensor, "n side"]:
    """Return the share of each position along a side in the mean of each cell."""
    at = torch.arange(side, device=like.device, dtype=like.dtype) / side
    cell = torch.arange(num_cells, device=like.device, dtype=like.dtype).unsqueeze(1) / num_cells
    end = torch.minimum(at + 1 / side, cell + 1 / num_cells)
    return num_cells * (end - torch.maximum(at, cell)).clamp(min=0)
