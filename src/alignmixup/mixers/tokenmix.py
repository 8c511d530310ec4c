"""TokenMix (Liu et al. 2022): mix blocks of tokens; labels by where the class is seen.

    M: N of g x g tokens of the partner, in rectangles or at random, one mask per batch
    y1 = sum(A_i (1 - M)),  y2 = sum(A_perm[i] M)       A_i: where image i shows its class, sum 1
    t = y1 y + y2 y',  each half smoothed by s / 2

The shares need not sum to 1. N does not depend on a draw from a Beta distribution.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible, soft_targets
from alignmixup.mixers.attention import attention_layers, clean_attention, nearest, normalized
from alignmixup.mixers.base import LOSSES, Loss, Method
from alignmixup.mixers.boxes import paste_partner
from alignmixup.mixers.checks import check_integers, check_unit, image_size, require
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.label_smoothing import LabelSmoothing
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.sampling import sample_perm, sample_unit
from alignmixup.ops.blend import check_logits
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name

Maps = Callable[[Tensor], Tensor]
LEAST_ASPECT, NUM_TRIES = 0.3, 10


@dataclass(frozen=True, slots=True, eq=False)
class TokenDraw(Draw):
    """A draw with the tokens of the partner; ``lam`` is the share of the others, 1 for no token."""

    mask: Bool[Tensor, "g g"]


@register_mixer
@dataclass(frozen=True)
class TokenMix(Method):
    """TokenMix (Liu et al. 2022): mix blocks of tokens, with labels by attention.

    By default the attention is that of the class token of the network itself, for the clean batch:
    one more forward pass without gradient. The authors use maps of a teacher, see ``with_maps``.
    ``TokenMix.released()`` is the published training, which switches with input mixup. Targets need
    not sum to 1.

    Args:
        grid: Number of tokens along a side.
        share: Share of the tokens that show the partner; 4/7 is the authors' 112 of 14 x 14.
        mask: ``"blocks"`` for rectangles of tokens, ``"random"`` for single tokens.
        score: ``"attention"`` of the class token, ``"area"``, or ``"maps"`` of a teacher.
        attention: Name of the attention layer, such as ``"blocks.11.attn"``; empty for the last.
        smoothing: Label smoothing, half of it for each of the two labels.
        loss: ``"sigmoid_bce"`` for binary cross-entropy of each class by itself; ``"ce"`` for
            cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

    Raises:
        ValueError: If a setting is out of range, or the network has no class token.

    Example:
        ```python
        import timm

        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        mixer = am.TokenMix(grid=2)
        mixer(vit, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True

    grid: int = 14
    share: float = 4 / 7
    mask: Literal["blocks", "random"] = "blocks"
    score: Literal["attention", "area", "maps"] = "attention"
    attention: str = ""
    smoothing: float = 0.0
    loss: Loss = "sigmoid_bce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 2, "grid")
        check_layer_name(self.attention)
        check_unit(self, "share", "smoothing")

    @classmethod
    def released(cls, attention: str = "") -> OneOf:
        """Return the published training, with our attention: TokenMix or input mixup, by half."""
        mixup = LabelSmoothing(InputMixup(alpha=0.8, loss="sigmoid_bce"), 0.1)
        return OneOf((cls(attention=attention, smoothing=0.1), mixup), pairing="reverse")

    def with_maps(self, maps: Maps) -> TokenMix:
        """Return the mixer with a teacher's maps, for ``score="maps"``; they are no setting.

        Args:
            maps: Function of images ``[b, c, h, w]`` that returns the map of each class,
                ``[b, k, n, m]``; negative values count as zero.
        """
        copied = copy.copy(self)
        object.__setattr__(copied, "_maps", maps)  # settings are frozen
        return copied

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return attention_layers(net, self.attention) if self.score == "attention" else ()

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm, num = sample_perm(batch_size, rng), round(self.share * self.grid**2)
        if self.mask == "random":
            order = torch.randperm(self.grid**2, generator=rng, device=rng.device)
            mask = (order < num).view(self.grid, self.grid)
        else:
            mask = torch.tensor(block_mask(self.grid, num, rng), device=rng.device)
        return TokenDraw("cut", perm, 1 - mask.float().mean(), mask=mask)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw, size = require(draw, TokenDraw, self), image_size(x)
        if min(size) < len(draw.mask):
            raise ValueError(
                f"a grid of {len(draw.mask)} x {len(draw.mask)} tokens is finer than images of "
                f"{size[0]} x {size[1]} pixels: choose a smaller grid"
            )
        mask = nearest(draw.mask & (draw.lam < 1), size)
        images, lam = paste_partner(x, draw.perm, mask)
        shares = (lam.expand(len(x)), (1 - lam).expand(len(x)))
        if self.score != "area":
            shares = shown_shares(normalized(self._scores(net, x, y)), draw.perm, mask)
        logits = net(images)
        check_logits(logits, len(x))
        labels = soft_targets(y, logits.shape[1], multi_label=self.is_multi_label)
        targets = token_targets(labels, draw.perm, *shares, smoothing=self.smoothing)
        return Mixed(logits, targets, {}, LOSSES[self.loss], self.smoothing)

    def _scores(self, net: nn.Module, x: Tensor, y: Tensor) -> Float[Tensor, "b n m"]:
        """Return where each clean image shows its class, without gradient."""
        if self.score == "attention":
            return clean_attention(net, x, self.attention)
        teacher: Maps | None = vars(self).get("_maps")
        if teacher is None:
            raise ValueError(
                "score='maps' needs a teacher: mixer = mixer.with_maps(function of images)"
            )
        with torch.no_grad():
            maps = teacher(x)
        if maps.ndim != 4 or len(maps) != len(x):
            raise ValueError(
                f"the teacher must return maps [{len(x)}, k, n, m], got {list(maps.shape)}"
            )
        labels = soft_targets(y, maps.shape[1], multi_label=self.is_multi_label).to(maps)
        return (labels[:, :, None, None] * maps).sum(1).relu()


@fusible
def shown_shares(
    scores: Float[Tensor, "b n m"], perm: Int[Tensor, " b"], mask: Bool[Tensor, "h w"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return the scores of the anchor outside the mask and of the partner inside."""
    covered = nearest(mask, (scores.shape[1], scores.shape[2]))
    inside = torch.where(covered, scores, 0).sum((1, 2))
    return 1 - inside, inside[perm]


@fusible
def token_targets(
    labels: Float[Tensor, "b k"],
    perm: Int[Tensor, " b"],
    own: Float[Tensor, " b"],
    other: Float[Tensor, " b"],
    *,
    smoothing: float,
) -> Float[Tensor, "b k"]:
    """Return y1 y + y2 y', each smoothed by half and never negative."""
    one, two = (
        ((share.to(labels) - smoothing / 2).unsqueeze(1) * rows + smoothing / 2 / rows.shape[1])
        for share, rows in ((own, labels), (other, labels[perm]))
    )
    return one.clamp(min=0) + two.clamp(min=0)


def block_mask(grid: int, num: int, rng: torch.Generator) -> list[list[bool]]:
    """Add rectangles of tokens until ``num`` are covered.

    Area uniform from 1 to what is left, aspect log-uniform, place uniform; a rectangle must add at
    least one and at most as many as are left. After ten in a row that do not, it ends: a few masks
    have slightly less than ``num``. A row of the mask is an integer of bits.
    """
    rows, rest, chance = [0] * grid, num, _uniforms(rng)
    while rest:
        for _ in range(NUM_TRIES):
            area, aspect, down, right = next(chance)
            area = 1 + area * (rest - 1)
            aspect = LEAST_ASPECT ** (1 - 2 * aspect)
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height >= grid or width >= grid:
                continue
            top, left = int(down * (grid - height + 1)), int(right * (grid - width + 1))
            bits = ((1 << width) - 1) << left
            new = sum((bits & ~row).bit_count() for row in rows[top : top + height])
            if 0 < new <= rest:
                rows[top : top + height] = [row | bits for row in rows[top : top + height]]
                rest -= new
                break
        else:
            break
    return [[bool(row >> column & 1) for column in range(grid)] for row in rows]


def _uniforms(rng: torch.Generator) -> Iterator[list[float]]:
    """Yield four uniform numbers at a time, drawn in blocks: a call per number would be slow."""
    while True:
        yield from sample_unit((64, 4), rng).tolist()
