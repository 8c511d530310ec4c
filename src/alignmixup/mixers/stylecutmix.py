"""StyleCutMix (Hong et al. 2021): CutMix of the content, and styles mixed everywhere.

    g12 = gamma x  + (1 - gamma) d(adain(f(x), f(x')))     anchor in the partner's style
    g21 = gamma x' + (1 - gamma) d(adain(f(x'), f(x)))     the reverse
    x~  = rs x + (1 - rs) g12     outside the box: content of the anchor
    x~  = (1 - rs) x' + rs g21    inside the box: content of the partner
    lam = r lam_c + (1 - r) (gamma lam_c + (1 - gamma) rs)

lam_c is the share outside the box, exact after clipping; rs is the anchor's share of style. In the
authors' code the box shows the anchor, and has the area that CutMix leaves outside. That is the
same distribution with anchor and partner swapped; here lam = 1 remains the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.boxes import BoxDraw, paste, share_mask, shown_share
from alignmixup.mixers.checks import check_alpha, image_size, require
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.ops.adain import AdaIN, adain, style_statistics
from alignmixup.ops.blend import blend
from alignmixup.registry import register_mixer

Gamma = Literal["beta", "auto"]

# Added to the distance of a class to itself, as the authors do: gamma is then not zero.
SAME_CLASS = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class StyleCutDraw(BoxDraw):
    """A draw with a box, the anchor's share of style, and the share of unstylized pixels."""

    style: Float[Tensor, ""]
    gamma: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class StyleCutMix(StyleMixer):
    """StyleCutMix (Hong et al. 2021): CutMix of the content, with styles mixed everywhere.

    There is one box per batch.

    Args:
        weights: A ``.safetensors`` file made by ``alignmixup adain`` or a folder with the reference
            weights. Training a recipe without weights fits a small network first.
        sha256: Expected checksum of the file; empty for no check.
        input_size: Side that images are resized to for the style network; None for 224 with the
            reference weights and no resizing with small ones.
        content_weight: Weight of the content in the label; the style has the rest.
        mean: Channel means your loader normalizes by; None for images in [0, 1].
        std: Channel standard deviations your loader normalizes by; None for images in [0, 1].
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        alpha: Area of the box and share of style are drawn from Beta(alpha, alpha).
        prob: Probability that a batch is mixed.
        gamma: ``"beta"`` draws gamma from Beta(gamma_alpha, gamma_alpha), one per batch; ``"auto"``
            takes tanh(D / delta) of the style distance of the two classes, one per pair. The
            distances are in the file of the weights.
        gamma_alpha: Parameter of that Beta distribution.
        delta: Scale of the style distance: 3 on CIFAR-100, 1 on CIFAR-10.

    Raises:
        ValueError: If a setting is out of range, or the weights are missing or damaged.

    Example:
        ```python
        from alignmixup.ops.adain import save_adain, small_adain

        # Random weights, to show the call; `alignmixup adain` trains them.
        save_adain(small_adain(4, torch.Generator().manual_seed(0)), "style.safetensors")
        mixer = am.StyleCutMix(weights="style.safetensors", prob=1.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_clean = True
    needs_network = False

    alpha: float = 1.0
    prob: float = 0.5
    gamma: Gamma = "beta"
    gamma_alpha: float = 0.8
    delta: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.gamma_alpha)
        if not self.delta > 0:
            raise ValueError(f"delta must be positive, got {self.delta}")

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        self.check_weights()
        case = sample_case(self.cases, rng)
        perm = sample_perm(batch_size, rng)
        lam, style = (sample_share(self.alpha, None, rng) for _ in range(2))
        gamma, center = sample_share(self.gamma_alpha, None, rng), sample_unit((2,), rng)
        return StyleCutDraw(case, perm, lam, center, style, gamma)

    def network(self, device: torch.device) -> AdaIN:
        style = super().network(device)
        if self.gamma == "auto" and style.class_distances is None:
            raise ValueError(
                f"the weights {self.weights!r} hold no class distances, which gamma='auto' needs: "
                "add them by `alignmixup adain DATASET --weights`, or set gamma='beta'"
            )
        return style

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, StyleCutDraw, self)
        style = self.network(x.device)
        gamma = draw.gamma if self.gamma == "beta" else self._auto_gamma(style, y, draw.perm)
        box = share_mask(draw.center, draw.lam, image_size(x))
        image = self._mix_images(style, x, draw, gamma, box)
        content = shown_share(box)
        in_style = gamma * content + (1 - gamma) * draw.style
        lam = self.content_weight * content + (1 - self.content_weight) * in_style
        return self._mixed(net(image), y, draw, lam)

    def _mix_images(
        self, style: AdaIN, x: Tensor, draw: StyleCutDraw, gamma: Tensor, box: Tensor
    ) -> Float[Tensor, "b 3 h w"]:
        features = style.encode(self.pixels(x), self.input_size)
        own = style_statistics(features)
        other, partner = own.of(draw.perm), x[draw.perm]
        # Both directions in one pass of the decoder.
        both = torch.cat([adain(features, other, own), adain(features[draw.perm], own, other)])
        stylized = self.like(style.decode(both, image_size(x), self.input_size), x)
        like_partner, like_anchor = stylized.chunk(2)
        outside = blend(x, blend(x, like_partner, gamma), draw.style)
        inside = blend(blend(partner, like_anchor, gamma), partner, draw.style)
        return paste(outside, inside, box)

    def _auto_gamma(self, style: AdaIN, y: Tensor, perm: Tensor) -> Float[Tensor, " b"]:
        """Return tanh(D / delta) of each pair; D is averaged over the classes of both labels."""
        assert style.class_distances is not None  # checked by network()
        k = len(style.class_distances)
        _check_classes(y, k)
        distances = style.class_distances + SAME_CLASS * torch.eye(
            k, device=y.device, dtype=torch.float32
        )
        rows = self._rows(y, k).float()
        rows = rows / rows.sum(1, keepdim=True).clamp(min=1e-6)  # a row may have no class
        with torch.autocast(y.device.type, enabled=False):
            apart = ((rows @ distances) * rows[perm]).sum(1)
        return torch.tanh(apart / self.delta)


def _check_classes(y: Tensor, num_classes: int) -> None:
    if y.ndim == 2:
        count = y.shape[1]
    elif y.device.type == "cpu" and y.numel():  # on a GPU this would synchronize
        count = max(num_classes, int(y.long().max()) + 1)
    else:
        return
    if count != num_classes:
        raise ValueError(
            f"labels have {count} classes but the weights have distances of {num_classes}: compute "
            "the distances on the training data"
        )
