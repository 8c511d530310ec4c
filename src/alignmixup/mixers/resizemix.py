"""ResizeMix (Qin et al. 2020): paste the whole partner, shrunk, so that its label is true.

tau ~ U(0.1, 0.8), h = floor(tau H), w = floor(tau W), center uniform over pixels. The box is moved
inside the image, so its area is exact: lam = 1 - h w / (H W). Row i of the box shows row
floor(i / tau) of the partner (nearest), columns likewise. The draw has lam0 = 1 - tau^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import BoxDraw, paste, shown_share
from alignmixup.mixers.checks import image_size, require
from alignmixup.mixers.sampling import sample_perm, sample_unit
from alignmixup.registry import register_mixer

Place = Literal["inside", "clipped"]


@register_mixer
@dataclass(frozen=True)
class ResizeMix(Method):
    """ResizeMix (Qin et al. 2020): paste the whole partner, shrunk; labels by area.

    Args:
        scope: Smallest and largest side of the box, as a share of the image's; one per batch.
        place: ``"inside"`` is the authors' code, one box per sample, moved inside the image.
            ``"clipped"`` has one box per batch, cut off at the border; the partner is resized to
            what is left of it.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.ResizeMix()
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    needs_network = False

    scope: tuple[float, float] = (0.1, 0.8)
    place: Place = "inside"
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scope) != 2 or not 0 <= self.scope[0] <= self.scope[1] <= 1:
            raise ValueError(f"scope must be two rising shares in [0, 1], got {self.scope}")

    @classmethod
    def openmixup(cls) -> ResizeMix:
        """Return OpenMixup's reading: one box per batch, clipped at the border."""
        return cls(place="clipped")

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm = sample_perm(batch_size, rng)
        low, high = self.scope
        tau = low + (high - low) * sample_unit((), rng)
        boxes = (2,) if self.place == "clipped" else (batch_size, 2)
        return BoxDraw("cut", perm, 1 - tau * tau, center=sample_unit(boxes, rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, BoxDraw, self)
        image_size(x)  # raises unless x is a batch of images
        mixed, lam = resize_mix(x, draw.perm, draw.lam, draw.center, self.place == "clipped")
        return self._mixed(net(mixed), y, draw, lam)


@fusible
def resize_mix(
    x: Float[Tensor, "b c h w"],
    perm: Int[Tensor, " b"],
    lam: Float[Tensor, ""],
    center: Float[Tensor, "*b 2"],
    is_clipped: bool,
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "*b"]]:
    """Return the mixed images and the anchor's share of the pixels."""
    tau = (1 - lam).sqrt()
    (in_rows, rows), (in_columns, columns) = (
        _span(center[..., axis], tau, x.shape[2 + axis], is_clipped) for axis in (0, 1)
    )
    box = in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)
    # The anchor is pasted into the copy: the result has its memory layout.
    return paste(gather_pixels(x[perm], rows, columns), x, ~box), shown_share(box)


def _span(
    center: Float[Tensor, "*b"], tau: Float[Tensor, ""], side: int, is_clipped: bool
) -> tuple[Bool[Tensor, "*b n"], Int[Tensor, "*b n"]]:
    """Return which pixels along one axis are in the box, and the partner's pixel for each."""
    at, length = (center * side).floor(), (tau * side).floor()
    half = (length / 2).floor()
    if is_clipped:
        low, high = (at - half).clamp(min=0), (at + half).clamp(max=side)
        step = side / (high - low).clamp(min=1)
    else:
        high = ((at - half).clamp(min=0) + length).clamp(max=side)
        low = high - length
        # The factor given, not side / length, which skips up to two pixels more at 32.
        step = (1 / tau.clamp(min=1e-6)).expand_as(low)
    positions = torch.arange(side, device=center.device, dtype=center.dtype)
    low, high, step = (t.unsqueeze(-1) for t in (low, high, step))
    source = ((positions - low) * step).floor().clamp(0, side - 1)
    return (positions >= low) & (positions < high), source.long()


def gather_pixels(
    x: Float[Tensor, "b c h w"], rows: Int[Tensor, "*b h"], columns: Int[Tensor, "*b w"]
) -> Float[Tensor, "b c h w"]:
    """Return x[i, :, rows[i, j], columns[i, k]] at pixel (j, k) of sample i."""
    b, c, h, w = x.shape
    samples, channels = (torch.arange(n, device=x.device) for n in (b, c))
    rows, columns = rows.expand(b, h).view(b, 1, h, 1), columns.expand(b, w).view(b, 1, 1, w)
    return x[samples.view(b, 1, 1, 1), channels.view(1, c, 1, 1), rows, columns]
