"""AttentiveMix (Walawalkar et al. 2020): paste the partner's cells that a guide finds strongest.

    a = mean over channels of the guide's last map of the partner, one value per cell
    M = the k largest of n cells, k = clip(floor(n (1 - lam0)), 1, n)
    lam = 1 - mean of M over pixels, per sample

The guide is a frozen pre-trained ResNet, or the network in training itself, which needs no file and
is a method of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.attention import clean_map, nearest
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import paste_partner
from alignmixup.mixers.checks import check_integers, image_size
from alignmixup.mixers.pixels import Scale, to_pixels
from alignmixup.mixers.sampling import sample_perm, sample_share
from alignmixup.ops.guide import load_guide
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name

SELF = "self"
PAPER_CELLS, PAPER_GRID = 6, 49


@register_mixer
@dataclass(frozen=True)
class AttentiveMix(Method):
    """AttentiveMix (Walawalkar et al. 2020): paste the strongest cells of the partner.

    Each step runs the guide on the clean batch, without gradient. With ``guide="self"`` that is the
    network in training, in evaluation mode: no file is needed, but it is not the published method.

    Args:
        guide: ``"self"``, or a ``.safetensors`` file with the weights of torchvision's ResNet.
        sha256: Expected checksum of the file; empty for no check.
        layer: Name of the layer whose output is the map, with ``guide="self"``.
        alpha: The number of cells is a share 1 - lam with ``lam`` from Beta(alpha, alpha).
        min_cells: Least number of cells; 0 allows an image without any.
        num_cells: A fixed number of cells instead; None: as drawn.
        guide_size: Side to which images are resized for the guide of a file.
        mean: Channel means your loader normalizes by, for the guide of a file; None for images in
            [0, 1].
        std: Channel standard deviations your loader normalizes by; None for images in [0, 1].
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range, or the weights are missing or damaged.

    Example:
        ```python
        mixer = am.AttentiveMix(layer="layer4")
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_one_lam = True

    guide: str = SELF
    sha256: str = ""
    layer: str = "layer4"
    alpha: float = 2.0
    min_cells: int = 1
    num_cells: int | None = None
    guide_size: int = 224
    mean: Scale = None
    std: Scale = None
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "guide", str(self.guide))  # a Path cannot be stored as JSON
        check_layer_name(self.layer)
        check_integers(self, 0, "min_cells")
        check_integers(self, 32, "guide_size")
        if self.num_cells is not None:
            check_integers(self, 1, "num_cells")
        if not self.guide or (self.sha256 and self.guide == SELF):
            raise ValueError(
                "guide must be 'self' or a file, and sha256 is set for a file only, got "
                f"guide={self.guide!r} and sha256={self.sha256!r}"
            )

    @classmethod
    def paper(cls, guide: str, sha256: str = "") -> AttentiveMix:
        """Return the paper's settings: always 6 of the 7 x 7 cells of a frozen ResNet-50."""
        return cls(guide, sha256, num_cells=PAPER_CELLS)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer,) if self.guide == SELF else ()

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        perm = sample_perm(batch_size, rng)
        if self.num_cells is None:
            return Draw("cut", perm, sample_share(self.alpha, None, rng))
        lam = max(0.0, 1 - self.num_cells / PAPER_GRID)  # nominal
        return Draw("cut", perm, torch.tensor(lam, device=rng.device, dtype=torch.float32))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        size = image_size(x)
        attention = self._maps(net, x).float().mean(1)
        cells = strongest(attention, draw.lam, self.min_cells, self.num_cells)
        # The source is the partner: its own cells, pasted where they were cut.
        mixed, lam = paste_partner(x, draw.perm, nearest(cells, size)[draw.perm])
        return self._mixed(net(mixed), y, draw, lam)

    def _maps(self, net: nn.Module, x: Tensor) -> Float[Tensor, "b c n m"]:
        """Return the guide's last map of the clean batch, without gradient."""
        if self.guide == SELF:
            return clean_map(net, x, self.layer)
        side = (self.guide_size, self.guide_size)
        with torch.no_grad():
            pixels = to_pixels(x.detach(), self.mean, self.std).float()
            pixels = F.interpolate(pixels, side, mode="bilinear", align_corners=False)
            maps: Tensor = load_guide(self.guide, sha256=self.sha256, device=x.device)(pixels)
        return maps


@fusible
def strongest(
    attention: Float[Tensor, "b n m"],
    lam: Float[Tensor, ""],
    min_cells: int,
    num_cells: int | None,
) -> Bool[Tensor, "b n m"]:
    """Return where the floor(n (1 - lam)) largest of n values are; of equal ones the first.

    With ``num_cells`` that many, unless lam is 1.
    """
    values = attention.flatten(1)
    num: Tensor = (values.shape[1] * (1 - lam)).floor().clamp(min_cells, values.shape[1])
    if num_cells is not None:
        num = torch.where(lam < 1, num_cells, 0)
    rank = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < num).view(attention.shape)
