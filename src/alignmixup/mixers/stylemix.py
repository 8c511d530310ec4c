"""StyleMix (Hong et al. 2021): mix content and style of two images in the space of AdaIN features.

    f11 = f(x),  f22 = f(x'),  f12 = adain(f11, f22),  f21 = adain(f22, f11)
    x~  = d( t f11 + (1 - rc - rs + t) f22 + (rc - t) f12 + (rs - t) f21 )
    lam = r rc + (1 - r) rs

rc and rs are the anchor's shares of content and of style; t, between max(0, rc + rs - 1) and
min(rc, rs), is the share of features with both content and style of the anchor; r is the weight of
content in the label. Encoder f and decoder d are frozen, and no gradient flows through the mixing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.checks import check_integers, image_size, require
from alignmixup.mixers.pixels import Scale, from_pixels, to_pixels
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.ops.adain import AdaIN, adain, find_weights, load_adain, style_statistics
from alignmixup.registry import register_mixer


@dataclass(frozen=True, slots=True, eq=False)
class StyleDraw(Draw):
    """A draw with the anchor's shares of content and style, and the position of t in its range."""

    content: Float[Tensor, ""]
    style: Float[Tensor, ""]
    joint: Float[Tensor, ""]


@dataclass(frozen=True)
class StyleMixer(Method):
    """Base of StyleMix and StyleCutMix: the AdaIN network and its weights file."""

    weights: str = ""
    sha256: str = ""
    input_size: int | None = None
    content_weight: float = 0.7
    mean: Scale = None
    std: Scale = None
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        # A Path becomes a string, which can be stored as JSON.
        super().__post_init__()
        object.__setattr__(self, "weights", str(self.weights))
        if self.sha256 and not self.weights:
            raise ValueError(
                f"sha256 {self.sha256!r} given without weights: set both, or leave it empty"
            )
        if self.input_size is not None:
            check_integers(self, 16, "input_size")

    def check_weights(self) -> None:
        """Raise a ``ValueError`` if there are no weights.

        Called at the first step and not at construction: recipes have style mixers without
        weights, for which training fits a small network.
        """
        if not self.weights:
            find_weights(self.weights)

    def describe(self) -> dict[str, object]:
        """Return path, kind ("reference" or "small"), sha256 and metadata of the weights."""
        return asdict(find_weights(self.weights))

    def network(self, device: torch.device) -> AdaIN:
        """Return the frozen style network on ``device``; the file is read once."""
        return load_adain(self.weights, sha256=self.sha256, device=device)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        self.check_weights()
        return super().apply(net, x, y, draw)

    def pixels(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if x.ndim != 4 or x.shape[1] != 3:
            raise ValueError(f"style mixing needs RGB images [b, 3, h, w], got {list(x.shape)}")
        return to_pixels(x, self.mean, self.std)

    def like(self, pixels: Float[Tensor, "n 3 h w"], x: Tensor) -> Float[Tensor, "n 3 h w"]:
        """Return ``pixels`` normalized and in the dtype of the images ``x``."""
        return from_pixels(pixels, self.mean, self.std).to(x.dtype)


@register_mixer
@dataclass(frozen=True)
class StyleMix(StyleMixer):
    """StyleMix (Hong et al. 2021): mix content and style of two images by AdaIN features.

    The defaults are the authors' for CIFAR, the only data they give settings for. A mixed image
    passes through the decoder, so ``lam = 1`` does not return the image bit for bit.

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
        alpha: Shares of content and of style are drawn from Beta(alpha, alpha).
        prob: Probability that a batch is mixed.

    Raises:
        ValueError: If a setting is out of range, or the weights are missing or damaged.

    Example:
        ```python
        from alignmixup.ops.adain import save_adain, small_adain

        # Random weights, to show the call; `alignmixup adain` trains them.
        save_adain(small_adain(4, torch.Generator().manual_seed(0)), "style.safetensors")
        mixer = am.StyleMix(weights="style.safetensors", prob=1.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    case = "style"
    has_clean = True
    needs_network = False

    alpha: float = 0.5
    prob: float = 0.2

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        self.check_weights()
        case = sample_case(self.cases, rng)
        perm = sample_perm(batch_size, rng)
        content, style = (sample_share(self.alpha, None, rng) for _ in range(2))
        lam = self.content_weight * content + (1 - self.content_weight) * style
        return StyleDraw(case, perm, lam, content, style, joint=sample_unit((), rng))

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, StyleDraw, self)
        style = self.network(x.device)
        features = style.encode(self.pixels(x), self.input_size)
        mixed = mix_styles(features, draw.perm, draw.content, draw.style, draw.joint)
        image = self.like(style.decode(mixed, image_size(x), self.input_size), x)
        return self._mixed(net(image), y, draw)


def mix_styles(
    features: Float[Tensor, "b c h w"],
    perm: Int[Tensor, " b"],
    content: Float[Tensor, ""],
    style: Float[Tensor, ""],
    joint: Float[Tensor, ""],
) -> Float[Tensor, "b c h w"]:
    """Mix f11, f22, f12 and f21 of each pair; ``joint`` places t in its range."""
    f11, own = features, style_statistics(features)
    f22, other = features[perm], own.of(perm)
    low, high = (content + style - 1).clamp(min=0), torch.minimum(content, style)
    t = torch.lerp(low, high, joint)
    f12, f21 = adain(f11, other, own), adain(f22, own, other)
    rest = 1 - content - style + t
    return t * f11 + rest * f22 + (content - t) * f12 + (style - t) * f21
