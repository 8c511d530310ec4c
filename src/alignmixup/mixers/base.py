"""The template of all methods: ``apply`` validates the batch, ``_mix`` mixes it.

A method is a frozen dataclass that extends ``Method``: it has ``case`` or ``cases``, ``draw`` as
every ``Mixer``, and ``_mix`` for the arithmetic on a batch that has been validated. What methods
share beside it is in ``checks``, ``sampling``, ``boxes`` and ``pixels``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import (
    Criterion,
    Draw,
    Mixed,
    Mixer,
    sigmoid_bce,
    soft_cross_entropy,
    soft_targets,
    softmax_bce,
)
from alignmixup.mixers.checks import check_alpha, check_batch, check_unit
from alignmixup.mixers.pixels import check_scale
from alignmixup.mixers.sampling import CLEAN, probabilities
from alignmixup.ops.blend import check_logits, mixed_targets

Loss = Literal["ce", "bce", "sigmoid_bce"]
LOSSES: dict[str, Criterion] = {
    "ce": soft_cross_entropy,
    "bce": softmax_bce,
    "sigmoid_bce": sigmoid_bce,
}


class Method(Mixer):
    """Base class of the built-in mixers: ``apply`` validates the batch, ``_mix`` mixes it."""

    # The case that mixes, unless ``cases`` is overridden, and whether it has only the probability
    # ``prob``: all other batches are then CLEAN.
    case: ClassVar[str] = ""
    has_clean: ClassVar[bool] = False
    # Whether all samples share one mask, so that ``lam`` of a draw must be a scalar.
    has_one_lam: ClassVar[bool] = False

    loss: Loss

    def __post_init__(self) -> None:
        """Check the settings that methods share, by name."""
        super().__post_init__()
        settings = vars(self)
        may_be_none = getattr(type(self), "alpha", None) is None  # where that is the default
        if "alpha" in settings and not (may_be_none and settings["alpha"] is None):
            check_alpha(settings["alpha"])
        if "mean" in settings:
            check_scale(settings["mean"], settings["std"])
        std = settings.get("saliency_std")
        if std is not None and not min(std) > 0:
            raise ValueError(f"saliency_std must be positive, got {std}")
        shares = ("prob", "adv_prob", "content_weight", "omega")
        check_unit(self, *(name for name in shares if name in settings))

    @property
    def is_multi_label(self) -> bool:
        """Whether targets have one value per class that need not sum to 1."""
        return self.loss == "sigmoid_bce"

    @property
    def cases(self) -> Mapping[str, float]:
        prob = getattr(self, "prob", 1.0) if self.has_clean else 1.0
        return probabilities({self.case: prob, CLEAN: 1 - prob})

    @property
    def known_cases(self) -> Collection[str]:
        """Cases that ``apply`` accepts; ``cases`` has those of positive probability."""
        return (self.case, CLEAN) if self.has_clean else self.cases

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        check_batch(x, y, draw)
        if draw.case not in self.known_cases:
            raise ValueError(
                f"the draw's case is {draw.case!r}, but this mixer has {list(self.known_cases)}: "
                "use its own draw()"
            )
        if self.has_one_lam and draw.lam.ndim:
            raise ValueError(
                f"{type(self).__name__} has one lam per batch, got {list(draw.lam.shape)}: use a "
                "scalar, as its own draw() does"
            )
        mix = self._clean if draw.case == CLEAN else self._mix
        return mix(net, x, y, draw.to(x.device))

    def _clean(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Run the network on the batch without mixing."""
        return self._mixed(net(x), y, draw, torch.ones_like(draw.lam))

    @abstractmethod
    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        """Run the network on the mixed batch; ``draw`` is on the device of ``x``."""

    def _rows(self, y: Tensor, num_classes: int) -> Float[Tensor, "b k"]:
        """Return the labels as rows of targets; multi-label ones if the loss is for them."""
        return soft_targets(y, num_classes, multi_label=self.is_multi_label)

    def _mixed(
        self,
        logits: Tensor,
        y: Tensor,
        draw: Draw,
        lam: Float[Tensor, "*b"] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Mixed:
        """Return the logits with the labels mixed by ``lam``, by default that of the draw."""
        check_logits(logits, len(y))
        share = draw.lam if lam is None else lam
        targets = mixed_targets(y, draw.perm, share, logits.shape[1], self.is_multi_label)
        return Mixed(logits, targets, extra or {}, LOSSES[self.loss])


class ImageMethod(Method):
    """Base class of methods that mix images alone, by one ``lam`` per batch or per sample.

    With ``lam_per_sample`` every tensor of a draw has one row per sample.
    """

    needs_network = False

    lam_per_sample: bool

    @abstractmethod
    def mix_images(self, x: Tensor, draw: Draw) -> tuple[Tensor, Float[Tensor, "*b"]]:
        """Return the mixed images and the share of the anchor in the labels."""

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        images, lam = self.mix_images(x, draw)
        return self._mixed(net(images), y, draw, lam)
