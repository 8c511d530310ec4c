"""AlignMixup (Venkataramanan et al. 2022): interpolate images, or features after alignment.

One case is drawn per batch (paper, appendix A):

    input   lam x  + (1 - lam) x'
    feat    lam A  + (1 - lam) A~      A~: features of the partner at the positions of the anchor
    feat'   lam A~'+ (1 - lam) A'      A~': features of the anchor at the positions of the partner

Targets are lam y + (1 - lam) y' in all cases; lam is the share of the anchor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed
from alignmixup.hooks import check_rows, tap
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.checks import check_integers, check_weights
from alignmixup.mixers.layouts import (
    UNKNOWN,
    PrefixTokens,
    looks_channels_last,
    prefix_tokens,
    returns_channels_last,
)
from alignmixup.mixers.sampling import probabilities, sample_pairs
from alignmixup.ops.align import align_mix
from alignmixup.ops.blend import blend_with_partner
from alignmixup.ops.sinkhorn import Backend, Side, check_settings
from alignmixup.outputs import Key, Selection, WrongOutput
from alignmixup.registry import register_mixer
from alignmixup.wrappers import check_layer_name, find_layer

CASES = ("input", "feat", "feat'")
FEATURE_CASES = {"feat", "feat'"}

# Modules that return [b, c, n], which has as many dimensions as tokens [b, n, c].
LINES = (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)


@register_mixer
@dataclass(frozen=True)
class AlignMixup(Method):
    """AlignMixup (Venkataramanan et al. 2022): mix images, or the aligned features of a layer.

    **Where alignment has an effect.** A plan with an exact marginal preserves the mean over
    positions. Before average pooling and a linear layer it changes neither logits nor gradients.
    It can change them before a flattened head, at an earlier layer, or before any other function
    that is not linear in the mean. By default the marginal is exact in both directions. In
    ``released()``, with the authors' ``last="columns"``, it is exact for feat only: feat' changes
    the logits by the remaining error of the row sums after 100 iterations. Measure the effect on
    your model with ``alignment_effect(model, mixer, x)``.

    Args:
        layer: Name of a sub-module that returns maps ``[b, c, h, w]`` or tokens ``[b, n, c]``, or
            has one of these in its ``output``.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        eps: Strength of the entropic regularization.
        num_iters: Sinkhorn iterations; 0 is cross-attention, normalized once.
        tol: Stop the iterations of a pair at this marginal error; None runs all of them.
        weights: Relative probability of the cases ``"input"``, ``"feat"`` and ``"feat'"``; equal by
            default, as in the paper.
        aligned: False mixes position by position, without a transport plan.
        lam_per_sample: Draw one ``lam`` per sample, as in the paper's algorithm, instead of one per
            batch, as in the authors' code.
        resolution: Average maps down to this many rows and columns for mixing, then repeat the
            result back to the size of the map.
        last: The marginal of the plan that is exact; None chooses the one that preserves the mean
            over positions, in both directions.
        backend: Solver of the transport problems; ``"auto"`` chooses by device.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.
        prefix_tokens: Number of leading tokens that are not positions of the image (class token,
            registers). They are mixed in place and not aligned. None takes ``num_prefix_tokens`` of
            the innermost module around ``layer`` that has this attribute, as timm's vision
            transformers do, or 0, also where the layer returns ``patch_embed.num_patches`` tokens;
            a network with a class token and no such attribute is an error.
        output: Index or name of the features in the output of a layer that returns a tuple, a dict
            or a ``ModelOutput``; None for a layer that returns a tensor.
        channels_last: Whether the layer returns maps ``[b, h, w, c]``. None takes ``output_fmt`` of
            the innermost module around ``layer`` that has it, as timm's Swin does, or False; square
            maps that look like ``[b, h, w, c]`` without it are an error.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        mixer = am.AlignMixup(layer="layer4", alpha=2.0)
        mixer(model, x, y).loss().backward()
        ```
    """

    known_cases = CASES

    layer: str = "layer4"
    alpha: float = 2.0
    eps: float = 0.1
    num_iters: int = 100
    tol: float | None = None
    weights: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(CASES, 1.0), hash=False
    )  # a dict has no hash: mixers that differ in it alone share theirs
    aligned: bool = True
    lam_per_sample: bool = False
    resolution: int | None = None
    last: Side | None = None
    backend: Backend = "auto"
    loss: Loss = "ce"
    prefix_tokens: int | None = None
    output: Key | None = None
    channels_last: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_name(self.layer)
        check_weights(self.weights, CASES)
        check_settings(self.eps, self.num_iters, self.tol, self.last or "columns")
        if self.resolution is not None:
            check_integers(self, 1, "resolution")
        if self.prefix_tokens is not None:
            check_integers(self, 0, "prefix_tokens")

    @classmethod
    def released(cls, layer: str = "layer4") -> Self:
        """Return the settings of the authors' code.

        The input is mixed in half of the steps, and the columns are updated last in both
        directions.
        """
        return cls(layer, weights={"input": 2.0, "feat": 1.0, "feat'": 1.0}, last="columns")

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities(self.weights)

    @property
    def feature_mixer(self) -> AlignMixup | None:
        """The mixer that aligns features: this one, or None if it never aligns."""
        return self if self.aligned and self.cases.keys() & FEATURE_CASES else None

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return sample_pairs(self.weights, self.alpha, self.lam_per_sample, batch_size, rng)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        if draw.case == "input":
            x = blend_with_partner(x, draw.perm, draw.lam)
        with self.tap(net, draw.case, draw.perm, draw.lam):
            logits = net(x)
        return self._mixed(logits, y, draw)

    def tapped(self, net: nn.Module) -> Sequence[str]:
        return (self.layer,)

    def tap(
        self, net: nn.Module, case: str, perm: Tensor, lam: Tensor
    ) -> AbstractContextManager[None]:
        """Mix the output of ``layer`` during a forward pass of ``net``.

        In the input case the output is only checked, so that an unsuitable layer or resolution
        raises in the first step, unless the mixer never mixes features.
        """
        action = mix_features if case in FEATURE_CASES else check_features
        part = self.selection(net)
        if returns_lines(find_layer(net, self.layer)[0]):
            raise ValueError(
                f"layer {self.layer!r} ends in a 1-D convolution or pooling, which returns "
                "[b, c, n]; AlignMixup takes tokens [b, n, c] or maps [b, c, h, w]: use "
                "ManifoldMixup, or a layer that returns one of these, such as [b, c, n, 1]"
            )
        if not self.cases.keys() & FEATURE_CASES:
            return tap(net, part, None)
        return tap(net, part, action, self, case, perm, lam, self.prefix(net))

    def selection(self, net: nn.Module) -> Selection:
        """Return which tensor of the output of ``layer`` is mixed, and its layout."""
        is_last = self.channels_last
        if is_last is None:
            is_last = returns_channels_last(net, self.layer)
        return Selection(self.layer, self.output, is_last)

    def prefix(self, net: nn.Module) -> PrefixTokens:
        """Return the setting, or what the network has; unknown if it does not say how many."""
        if self.prefix_tokens is not None:
            return PrefixTokens(self.prefix_tokens)
        return prefix_tokens(net, self.layer)


def returns_lines(module: nn.Module) -> bool:
    """Whether a module is, or a Sequential ends in, one of ``LINES``."""
    if isinstance(module, nn.Sequential):
        rest = [part for part in module if not _keeps_shape(part)]
        return bool(rest) and returns_lines(rest[-1])
    return isinstance(module, LINES)


def _keeps_shape(module: nn.Module) -> bool:
    kept = isinstance(module, nn.BatchNorm1d | nn.Dropout | nn.Identity)
    return kept or type(module).__module__ == nn.ReLU.__module__


def check_features(
    output: Tensor, mixer: AlignMixup, case: str, perm: Tensor, lam: Tensor, prefix: PrefixTokens
) -> Tensor:
    """Return the output of a layer unchanged; raise if it cannot be mixed."""
    shape = list(output.shape)
    if output.ndim not in (3, 4):
        hint = (
            " (AlignMixupAE mixes a vector as 'e', without alignment)" if output.ndim == 2 else ""
        )
        raise WrongOutput(
            f"layer {mixer.layer!r} returns {shape}; AlignMixup needs maps "
            f"[b, c, h, w] or tokens [b, n, c]: choose a layer that returns one of these{hint}"
        )
    check_rows(output, mixer.layer, len(perm))
    side = mixer.resolution
    if side is not None and (output.ndim != 4 or shape[2] % side or shape[3] % side):
        raise ValueError(
            f"resolution {side} must divide the sides of a map; layer {mixer.layer!r} returns "
            f"{shape}: choose a divisor, or None"
        )
    if mixer.prefix_tokens and output.ndim == 4:
        raise ValueError(
            f"prefix_tokens is {mixer.prefix_tokens}, but layer {mixer.layer!r} returns maps "
            f"{shape}, which have no tokens: set it to None"
        )
    if mixer.channels_last and output.ndim != 4:
        raise ValueError(
            f"channels_last is set, but layer {mixer.layer!r} returns {shape}, not maps "
            "[b, h, w, c]: set it to None"
        )
    needs_layout = mixer.channels_last is None and (mixer.aligned or side is not None)
    if output.ndim == 4 and needs_layout and looks_channels_last(shape):
        raise ValueError(
            f"layer {mixer.layer!r} returns {shape}, which looks like maps [b, h, w, c]: set "
            "channels_last to True, or to False if they are [b, c, h, w]"
        )
    count = prefix.of(output) if output.ndim == 3 else 0
    if count == UNKNOWN:
        raise ValueError(
            f"the network has a class token, and does not say how many of the {shape[1]} tokens of "
            f"layer {mixer.layer!r} are no positions of the image: set prefix_tokens to their "
            "number, or to 0"
        )
    if output.ndim == 3 and count >= shape[1]:
        raise ValueError(
            f"prefix_tokens {count} leaves no token to align of the {shape[1]} of layer "
            f"{mixer.layer!r}: set a smaller number"
        )
    return output


def mix_features(
    output: Tensor, mixer: AlignMixup, case: str, perm: Tensor, lam: Tensor, prefix: PrefixTokens
) -> Tensor:
    """Mix the output of a layer; the first ``prefix`` tokens without alignment."""
    check_features(output, mixer, case, perm, lam, prefix)
    count = prefix.of(output) if output.ndim == 3 else 0
    if count > 0:
        first = blend_with_partner(output[:, :count], perm, lam)
        rest = mix_features(output[:, count:], mixer, case, perm, lam, PrefixTokens(0))
        return torch.cat((first, rest), dim=1)
    coarse = to_resolution(output, mixer.resolution)
    if mixer.aligned:
        mixed = align_mix(
            coarse,
            perm,
            lam,
            keep="anchor" if case == "feat" else "partner",
            eps=mixer.eps,
            num_iters=mixer.num_iters,
            tol=mixer.tol,
            last=mixer.last,
            backend=mixer.backend,
        )
    else:
        mixed = blend_with_partner(coarse, perm, lam)
    return mixed if coarse is output else F.interpolate(mixed, output.shape[2:], mode="nearest")


def to_resolution(output: Tensor, resolution: int | None) -> Tensor:
    """Average maps down to ``resolution`` rows and columns; None returns them unchanged."""
    return output if resolution is None else F.adaptive_avg_pool2d(output, resolution)
