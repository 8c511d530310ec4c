"""MultiMix (Venkataramanan et al. 2023): many mixes of all embeddings of a batch, not b of pairs.

    Z~ = Z Lambda,   Y~ = Y Lambda,   columns of Lambda ~ Dirichlet(alpha 1_b)

Z: embeddings [d, b] before the classifier, Y: targets [k, b], Lambda: b x n with n >> b. A column
sums to 1 and the classifier is affine, so mixing embeddings is mixing logits: no layer is tapped.

The dense form mixes at each position j of the last map, with a matrix M^j of its own:

    M^j = diag(a^j) Lambda^j, columns divided by their sums;   the loss is that of each position

a_i: attention of image i over its positions, non-negative, with sum 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, fusible
from alignmixup.hooks import peek
from alignmixup.mixers.attention import find_classifier, find_linear
from alignmixup.mixers.base import LOSSES, Loss, Method
from alignmixup.mixers.checks import check_alpha, check_integers, require
from alignmixup.mixers.layouts import channels_first
from alignmixup.mixers.sampling import (
    probabilities,
    sample_case,
    sample_perm,
    sample_share,
    sample_unit,
)
from alignmixup.ops.blend import blend_with_partner, check_logits, without_autocast
from alignmixup.ops.philox import dirichlet
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name

Attention = Literal["gap", "cam", "uniform"]
SAME = 0.1  # more than the rounding of a mean in bfloat16, or dropout of which nothing shows


@dataclass(frozen=True, slots=True, eq=False)
class SeedDraw(Draw):
    """A draw whose weights ``apply`` makes from a seed: the host would take longer than a step."""

    seed: Int[Tensor, ""]
    concentration: Float[Tensor, ""]


@register_mixer
@dataclass(frozen=True)
class MultiMix(Method):
    """MultiMix (Venkataramanan et al. 2023): many mixes of all embeddings of a batch.

    The logits have ``num_mixes`` rows instead of one per image. Half of the batches use input mixup
    instead.

    Args:
        num_mixes: Number of mixes per batch.
        min_alpha: The concentration of a batch is uniform from here ...
        max_alpha: ... to here.
        prob: Probability of mixing embeddings; otherwise input mixup.
        alpha: Input mixup draws ``lam`` from Beta(alpha, alpha).
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.MultiMix(num_mixes=1000)
        mixer(model, x, y).loss().backward()
        ```
    """

    num_mixes: int = 1000
    min_alpha: float = 0.5
    max_alpha: float = 2.0
    prob: float = 0.5
    alpha: float = 1.0
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 1, "num_mixes")
        for bound in (self.min_alpha, self.max_alpha):
            check_alpha(bound)
        if self.min_alpha > self.max_alpha:
            raise ValueError(
                f"min_alpha must be at most max_alpha, got {self.min_alpha} and {self.max_alpha}"
            )

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities({"all": self.prob, "input": 1 - self.prob})

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        case = sample_case(self.cases, rng)
        perm, lam = sample_perm(batch_size, rng), sample_share(self.alpha, None, rng)
        seed = torch.randint(2**62, (), generator=rng, device=rng.device)
        width = self.max_alpha - self.min_alpha
        concentration = self.min_alpha + width * sample_unit((), rng)
        return SeedDraw(case, perm, lam, seed=seed, concentration=concentration)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if draw.case == "input":
            return self._mixed(net(blend_with_partner(x, draw.perm, draw.lam)), y, draw)
        logits = net(x)
        check_logits(logits, len(x))
        draw = require(draw, SeedDraw, self)
        shape = (len(x), self.num_mixes)
        weights = dirichlet(draw.seed, draw.concentration, shape, dim=0)
        mixed = mix_columns(logits, self._rows(y, logits.shape[1]), weights)
        return Mixed(*mixed, {}, LOSSES[self.loss])


@fusible
def mix_columns(
    logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"], weights: Float[Tensor, "b n"]
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Return W' z and W' t: a mix of all rows for each column of ``weights``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with without_autocast(logits):
        mixed = weights.to(dtype).T @ logits.to(dtype)
        return mixed.to(logits.dtype), weights.to(targets.dtype).T @ targets


@register_mixer
@dataclass(frozen=True)
class DenseMultiMix(MultiMix):
    """Dense MultiMix (Venkataramanan et al. 2023): mix at each position, weighted by attention.

    The logits have ``num_mixes`` rows per position. The network must end in average pooling of
    ``layer`` and the linear layer ``classifier``, which is checked on the CPU. No gradient reaches
    the attention.

    The settings that are not listed here are those of ``MultiMix``.

    Args:
        num_mixes: Number of mixes per batch and position.
        layer: Name of the layer whose output ``[b, c, h, w]`` is pooled.
        classifier: Name of the linear layer.
        attention: ``"gap"`` compares each position with the mean over positions, ``"cam"`` with the
            classifier's weights of the labels, ``"uniform"`` with nothing.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.DenseMultiMix(layer="layer4", classifier="head.linear")
        mixer(model, x, y).loss().backward()
        ```
    """

    layer: str = "layer4"
    classifier: str = "head.linear"
    attention: Attention = "gap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        check_layer_name(self.classifier)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer, self.classifier)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if draw.case == "input":
            x = blend_with_partner(x, draw.perm, draw.lam)
        # In both cases: torch.compile ignores hooks added later.
        find_linear(net, self.classifier)  # names it better than a tap does
        with (
            peek(net, self.layer) as peeked,
            peek(net, self.classifier, reads_input=True) as read,
        ):
            logits = net(x)
        check_logits(logits, len(x))
        features = channels_first(net, self.layer, peeked.output, x)
        linear = find_classifier(net, self.classifier, self.layer, features)
        if not is_mean(read.output, features):
            raise ValueError(
                f"classifier {self.classifier!r} does not read the mean of layer {self.layer!r} "
                "over positions, which DenseMultiMix mixes: choose the layer that is pooled right "
                "before it; with a normalization between the two, use MultiMix"
            )
        if draw.case == "input":
            return self._mixed(logits, y, draw)
        targets = self._rows(y, logits.shape[1])
        draw = require(draw, SeedDraw, self)
        shape = (features.shape[2:].numel(), len(x), self.num_mixes)
        weights = dirichlet(draw.seed, draw.concentration, shape, dim=1)
        attention = attention_map(features, targets, linear.weight, self.attention)
        at_positions = classify(linear, features)
        mixed = mix_positions(at_positions, targets, attention, weights)
        return Mixed(*mixed, {}, LOSSES[self.loss])


def is_mean(pooled: Tensor, features: Float[Tensor, "b c h w"]) -> bool:
    """Return whether ``pooled`` is the mean over positions, on the CPU; dropout may follow.

    On a GPU the check would wait for the device at each step.
    """
    if features.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    if pooled.shape != features.shape[:2]:
        return False
    read, mean = pooled.detach().double(), features.detach().double().mean((2, 3))
    is_dropped = (read == 0) & (mean != 0)
    if is_dropped.any():  # the others are scaled
        mean = torch.where(is_dropped, 0, mean)
        mean *= (read * mean).sum() / mean.square().sum().clamp_min(1e-30)
    return not bool((read - mean).norm() > SAME * read.norm())  # True for those of NaN


@fusible
def classify(linear: nn.Linear, features: Float[Tensor, "b c h w"]) -> Float[Tensor, "r b k"]:
    """Return the logits of each position of a map."""
    logits: Tensor = linear(features.flatten(2).permute(2, 0, 1).to(linear.weight.dtype))
    return logits


@fusible
def attention_map(
    features: Float[Tensor, "b c h w"],
    targets: Float[Tensor, "b k"],
    weight: Float[Tensor, "k c"],
    attention: Attention,
) -> Float[Tensor, "b r"]:
    """Return the attention of each image over its positions, without gradient."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    embeddings = features.detach().flatten(2).to(dtype)
    if attention == "uniform":
        return torch.full_like(embeddings[:, 0], 1 / embeddings.shape[2])
    if attention == "gap":
        return similarity(embeddings, embeddings.mean(2))
    return similarity(embeddings, targets.to(dtype) @ weight.detach().to(dtype))


def similarity(
    embeddings: Float[Tensor, "b c r"], guide: Float[Tensor, "b c"]
) -> Float[Tensor, "b r"]:
    """Return relu(z_ij . u_i) over its sum over positions; uniform where all are zero."""
    scores = (embeddings * guide.unsqueeze(2)).sum(1).relu()
    total = scores.sum(1, keepdim=True)
    return torch.where(total > 0, scores / total, 1 / scores.shape[1])


@fusible
def mix_positions(
    logits: Float[Tensor, "r b k"],
    targets: Float[Tensor, "b k"],
    attention: Float[Tensor, "b r"],
    weights: Float[Tensor, "r b n"],
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
    """Return the mixes of each position, one below the other; a column of zeros is not weighted."""
    weighted = attention.T.unsqueeze(2) * weights
    total = weighted.sum(1, keepdim=True)
    shares = torch.where(total > 0, weighted / total, weights)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    with without_autocast(logits):
        mixed = torch.einsum("rbk,rbn->rnk", logits.to(dtype), shares.to(dtype))
        labels = torch.einsum("bk,rbn->rnk", targets, shares.to(targets.dtype))
    return mixed.flatten(0, 1).to(logits.dtype), labels.flatten(0, 1)
