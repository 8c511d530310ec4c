"""TransMix (Chen et al. 2022): CutMix whose labels follow the attention of the class token.

    partner's share = (area + sum(M a) / sum(a)) / 2

a: attention of the class token to the patches in the last block, for the mixed image, of the same
forward pass and without gradient. M: the box, at the top left pixel of each patch. One box per
batch, one share per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.mixers.attention import attention_layers, nearest, normalized, peek_attention
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.boxes import BoxDraw, paste_partner, share_mask
from alignmixup.mixers.checks import image_size, require
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.sampling import sample_case, sample_perm, sample_share, sample_unit
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name


@register_mixer
@dataclass(frozen=True)
class TransMix(Method):
    """TransMix (Chen et al. 2022): CutMix with labels by the attention of the class token.

    For a vision transformer with a class token and timm's names. ``TransMix.released()`` is the
    published training, which switches with input mixup and smooths the labels.

    Args:
        attention: Name of the attention layer, such as ``"blocks.11.attn"``, whose ``q_norm`` and
            ``k_norm`` return queries and keys; empty for the last one.
        alpha: The area of the box is 1 - lam with ``lam`` from Beta(alpha, alpha).
        prob: Probability that a batch is mixed.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range, or the network has no class token.

    Example:
        ```python
        import timm

        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        mixer = am.TransMix()
        mixer(vit, x, y).loss().backward()
        ```
    """

    case = "cut"
    has_clean = True

    attention: str = ""
    alpha: float = 1.0
    prob: float = 1.0
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.attention)

    @classmethod
    def released(cls, attention: str = "") -> OneOf:
        """Return the training that was run: TransMix or input mixup, half of the batches each."""
        return _switched(cls(attention), 0.5)

    @classmethod
    def intended(cls, attention: str = "") -> OneOf:
        """Return the training of the authors' configuration: TransMix with probability 0.8.

        The configuration's key is misspelled, so that it had no effect.
        """
        return _switched(cls(attention), 0.8)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return attention_layers(net, self.attention)

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case, lam = sample_case(self.cases, rng), sample_share(self.alpha, None, rng)
        return BoxDraw(case, sample_perm(batch_size, rng), lam, center=sample_unit((2,), rng))

    def _clean(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        # In every case: torch.compile ignores hooks added later.
        with peek_attention(net, self.attention):
            return super()._clean(net, x, y, draw)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = require(draw, BoxDraw, self)
        box = share_mask(draw.center, draw.lam, image_size(x))
        images, lam = paste_partner(x, draw.perm, box)
        with peek_attention(net, self.attention) as attention:
            logits = net(images)
        return self._mixed(logits, y, draw, attended_share(attention.on_grid(x), box, lam))


def _switched(mixer: TransMix, prob: float) -> OneOf:
    mixers = (InputMixup(alpha=0.8), mixer)
    return OneOf(mixers, weights=(1 - prob, prob), smoothing=0.1, pairing="reverse")


@fusible
def attended_share(
    attention: Float[Tensor, "b n m"], box: Bool[Tensor, "h w"], lam: Float[Tensor, ""]
) -> Float[Tensor, " b"]:
    """Return the anchor's share of each label; ``lam`` is its share of the pixels."""
    covered = nearest(box, (attention.shape[1], attention.shape[2]))
    inside = torch.where(covered, normalized(attention), 0).sum((1, 2))
    return 1 - ((1 - lam) + inside) / 2
