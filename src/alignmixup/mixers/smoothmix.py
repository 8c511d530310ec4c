"""SmoothMix (Lee et al. 2020): CutMix with a Gaussian instead of a box.

    G(i, j) = exp(-((i - cy)^2 + (j - cx)^2) / (2 sigma^2))       sigma = H U(1/4, 1/2)
    x~ = (1 - s G) x + s G x'                                     lam = 1 - s mean(G)

cy = (H - 1) / 2 + r with r a uniform integer of H values around 0, cx likewise; s is the strength,
1 in the paper. The draw's lam is 1 - s, the share of the anchor at the center of the Gaussian, so
that lam = 1 is the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import BoxDraw
from alignmixup.mixers.checks import check_unit, image_size, require
from alignmixup.mixers.sampling import sample_perm, sample_unit
from alignmixup.registry import register_mixer

Labels = Literal["shown", "swapped"]


@dataclass(frozen=True, slots=True, eq=False)
class SmoothDraw(BoxDraw):
    """A draw with the spread of the Gaussian in [0, 1): sigma is H (1 + spread) / 4."""

    spread: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class SmoothMix(Method):
    """SmoothMix (Lee et al. 2020): blend in the partner by a Gaussian; labels by its mean.

    There is one Gaussian per batch.

    Args:
        strength: Share of the partner at the center of the Gaussian.
        labels: ``"shown"``: each label has the share of its pixels. ``"swapped"`` exchanges the
            two, see ``openmixup``.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.SmoothMix()
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True
    needs_network = False

    strength: float = 1.0
    labels: Labels = "shown"
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit(self, "strength")

    @classmethod
    def openmixup(cls) -> SmoothMix:
        """Return OpenMixup's code with its defect, to reproduce its published figures.

        The anchor's label gets the mean of the Gaussian, which is the partner's share of the
        pixels.
        """
        return cls(labels="swapped")

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm = sample_perm(batch_size, rng)
        lam = torch.full((), 1 - self.strength, device=rng.device, dtype=torch.float32)
        center = sample_unit((2,), rng)
        return SmoothDraw("cut", perm, lam, center=center, spread=sample_unit((), rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, SmoothDraw, self)
        image_size(x)  # raises unless x is a batch of images
        mixed, partner = smooth_mix(x, draw.perm, draw.lam, draw.center, draw.spread)
        lam = 1 - partner if self.labels == "shown" else partner
        return self._mixed(net(mixed), y, draw, lam)


@fusible
def smooth_mix(
    x: Float[Tensor, "b c h w"],
    perm: Int[Tensor, " b"],
    lam: Float[Tensor, ""],
    center: Float[Tensor, " 2"],
    spread: Float[Tensor, ""],
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, ""]]:
    """Return the mixed images and the partner's share of the pixels."""
    weight = (1 - lam) * gaussian(center, spread, (x.shape[2], x.shape[3]))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # lerp is exact where the weight is 0: the anchor comes back bit for bit.
    mixed = torch.lerp(wide, wide[perm], weight.to(wide.dtype)).to(x.dtype)
    return mixed, weight.mean()


def gaussian(
    center: Float[Tensor, " 2"], spread: Float[Tensor, ""], size: tuple[int, int]
) -> Float[Tensor, "h w"]:
    """Return the Gaussian of SmoothMix; ``center`` is (row, column) as fractions of the image."""
    sigma = size[0] * (1 + spread) / 4
    rows, columns = (_bell(center[axis], sigma, side) for axis, side in enumerate(size))
    return rows.unsqueeze(-1) * columns


def _bell(center: Tensor, sigma: Tensor, side: int) -> Float[Tensor, " n"]:
    at = (side - 1) / 2 + (center * side).floor() - side // 2
    positions = torch.arange(side, device=center.device, dtype=center.dtype)
    return torch.exp(-((positions - at) ** 2) / (2 * sigma * sigma))
