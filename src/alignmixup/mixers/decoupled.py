"""Decoupled mixup loss (Liu et al. 2023): each mixed class also competes without the other.

For a row with the mixed classes M = {k : t_k > 0}, at least two of them, and logits z:

    L = CE(z, t) + eta sum_{i in M} w_i [log(exp z_i + sum_{k not in M} exp z_k) - z_i]

w_i is t_i, as in the released templates, or 1, as in the paper.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from alignmixup.contracts import Mixed, Mixer, fusible, soft_cross_entropy, widened
from alignmixup.mixers.checks import check_nonnegative
from alignmixup.mixers.regmixup import RegMixup
from alignmixup.mixers.wrapper import Wrapper, within
from alignmixup.registry import register_mixer

Weight = Literal["label", "one"]
LEAST_SHARE = 1e-3  # a class with less of a label, beside its smoothing, is not mixed


@register_mixer
@dataclass(frozen=True)
class Decoupled(Wrapper):
    """Decoupled mixup (Liu et al. 2023): a loss for any mixer that is trained by cross-entropy.

    Classes that are mixed in a sample do not compete with each other in the added term, so that
    the network may be sure of both.

    Args:
        mixer: The method that mixes. Put label smoothing inside: ``Decoupled(LabelSmoothing(m))``.
        eta: Weight of the added term.
        weight: ``"label"`` weighs the term of a class by its share of the label, as the released
            templates do; ``"one"`` counts all alike, as the paper does.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.Decoupled(am.CutMix(prob=1.0), eta=0.1)
        mixer(model, x, y).loss().backward()
        ```
    """

    mixer: Mixer
    eta: float = 0.1
    weight: Weight = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative(self, "eta")
        if any(isinstance(inner, RegMixup) for inner in within(self.mixer)):
            raise ValueError(
                "RegMixup adds the loss of its mixed images by itself, where Decoupled would have "
                "no effect: use another mixer, such as InputMixup"
            )

    @classmethod
    def paper(cls, mixer: Mixer) -> Decoupled:
        """Return the paper's loss, where mixed classes count alike."""
        return cls(mixer, weight="one")

    def _wrap(self, mixed: Mixed) -> Mixed:
        if mixed.logits is None or self.eta == 0:
            return mixed
        if mixed.criterion is not soft_cross_entropy:
            raise ValueError(
                f"Decoupled extends cross-entropy, but {type(self.mixer).__name__} has another "
                "loss: set its loss='ce'"
            )
        loss = functools.partial(
            decoupled_cross_entropy,
            eta=self.eta,
            by_label=self.weight == "label",
            smoothing=mixed.smoothing,
        )
        return dataclasses.replace(mixed, criterion=loss)


@fusible
def decoupled_cross_entropy(
    logits: Float[Tensor, "b k"],
    targets: Float[Tensor, "b k"],
    *,
    eta: float,
    by_label: bool,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the mean over the batch of cross-entropy and ``eta`` times the decoupled term."""
    z = widened(logits)
    entropy = -(targets * z.log_softmax(dim=1)).sum(dim=1)
    is_mixed = targets > LEAST_SHARE + smoothing / targets.shape[1]
    # The least finite number, not -inf: the gradient stays finite where all classes are mixed.
    others = z.masked_fill(is_mixed, torch.finfo(z.dtype).min).logsumexp(dim=1, keepdim=True)
    # log(exp z + exp others) - z
    terms = F.softplus(others - z) * (targets if by_label else 1.0)
    is_counted = is_mixed & (is_mixed.sum(dim=1, keepdim=True) > 1)
    return (entropy + eta * torch.where(is_counted, terms, 0.0).sum(dim=1)).mean()
