"""AlignMixup/AE and AlignMixup/VAE (Venkataramanan et al. 2022): mixing with an autoencoder.

    A = F(x),   e = f(A),   logits = g(e),   x^ = D(e)

One case is drawn per batch:

    clean           L_r = |x - x^|^2 on the unmixed images: trains F, f and D
    input           the images are mixed                  \\
    feat, feat'     A is mixed, after alignment            |  L_c on g(e): trains F, f and g
    embed           the vector e is mixed                  |
    embed, embed'   the tensor E is mixed, after alignment /

The classifier never sees a decoded image, and the decoder never sees a mixed one. In the
variational form e is the pair (mu, sigma), mixed together; g and D read z, and the loss is

    z = mu + sigma noise,   L_r + KL(N(mu, sigma^2) || N(0, 1))

In evaluation there is no noise and z is mu.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, widened
from alignmixup.hooks import check_rows, tap
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.base import Loss, Method
from alignmixup.mixers.checks import check_integers, check_nonnegative, check_weights, require
from alignmixup.mixers.layer_sets import Layer, cases_of, check_layers
from alignmixup.mixers.sampling import CLEAN, probabilities, sample_normal, sample_pairs
from alignmixup.ops.blend import blend_with_partner
from alignmixup.ops.sinkhorn import Backend, Side
from alignmixup.registry import register_mixer
from alignmixup.wrappers import plain_module


@register_mixer
@dataclass(frozen=True)
class AlignMixupAE(Method):
    """AlignMixup/AE: mix images, features or embeddings, and reconstruct clean images in one case.

    For an ``AutoencodingClassifier``, or any network with the layers ``layer`` and ``embed`` and a
    ``decoder`` that ``net(x, decode=True)`` runs. The network needs only the parts that ``layers``
    and ``clean`` use: ``AlignMixupAE(layers=("x", "A", "e"), clean=False)`` is AlignMixup that also
    mixes e, and needs no decoder.

    The reconstruction error is the mean squared error over images and pixel values, in units of the
    standard deviation of the data. The paper has the sum; the mean has the scale of the
    classification loss, which shares its learning rate.

    Args:
        layer: Name of the layer that returns A.
        embed: Name of the layer that returns the embedding.
        layers: What is mixed: ``"x"`` the image, ``"A"`` the features, ``"e"`` a vector embedding
            or ``"E"`` a tensor embedding.
        clean: Add the case that reconstructs clean images with the decoder.
        reconstruction_weight: Weight of the reconstruction loss.
        alpha: ``lam`` is drawn from Beta(alpha, alpha).
        eps: Strength of the entropic regularization.
        num_iters: Sinkhorn iterations; 0 is cross-attention, normalized once.
        tol: Stop the iterations of a pair at this marginal error; None runs all of them.
        weights: Relative probability of the cases; None makes them equal.
        aligned: False mixes position by position, without a transport plan.
        lam_per_sample: Draw one ``lam`` per sample instead of one per batch.
        resolution: Average A down to this many rows and columns for mixing; E keeps its own.
        last: The marginal of the plan that is exact; None chooses the one that preserves the mean.
        backend: Solver of the transport problems; ``"auto"`` chooses by device.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax,
            ``"sigmoid_bce"`` for that of the sigmoid, with multi-label targets ``[b, k]``.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        from alignmixup.models import AutoencodingClassifier

        net = AutoencodingClassifier(model, image_size=32)
        am.AlignMixupAE()(net, x, y).loss().backward()
        ```
    """

    _is_variational: ClassVar[bool] = False

    layer: str = "encoder"
    embed: str = "embed"
    layers: tuple[Layer, ...] = ("x", "A", "e")
    clean: bool = True
    reconstruction_weight: float = 1.0
    alpha: float = 2.0
    eps: float = 0.1
    num_iters: int = 100
    tol: float | None = None
    weights: dict[str, float] | None = None
    aligned: bool = True
    lam_per_sample: bool = False
    resolution: int | None = None
    last: Side | None = None
    backend: Backend = "auto"
    loss: Loss = "ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.layers)
        check_weights(self._weights, self.known_cases)
        if not 0 < self.reconstruction_weight < math.inf:
            raise ValueError(
                "reconstruction_weight must be positive and finite, got "
                f"{self.reconstruction_weight}; to train without a decoder set clean=False"
            )
        _ = self._by_layer  # AlignMixup checks layer names, alpha, eps, num_iters, ...

    @cached_property
    def _by_layer(self) -> dict[str, AlignMixup]:
        """The mixers of the tensors at the two layers."""
        names = ("alpha", "eps", "num_iters", "tol", "aligned", "last", "backend", "loss")
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        feat = AlignMixup(self.layer, resolution=self.resolution, **shared)
        return {"feat": feat, "embed": AlignMixup(self.embed, **shared)}

    @property
    def known_cases(self) -> tuple[str, ...]:
        """All cases of the layer set."""
        return cases_of(self.layers, clean=self.clean)

    @property
    def _weights(self) -> dict[str, float]:
        return dict.fromkeys(self.known_cases, 1.0) if self.weights is None else self.weights

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities(self._weights)

    @property
    def feature_mixer(self) -> AlignMixup | None:
        """The mixer that aligns A, or E if A is not mixed; None if nothing is aligned."""
        cases = self.cases
        stems = ("feat",) if self._has_vector else ("feat", "embed")
        for stem in stems if self.aligned else ():
            weights = {"feat": cases.get(stem, 0.0), "feat'": cases.get(f"{stem}'", 0.0)}
            if any(weights.values()):
                return replace(self._by_layer[stem], weights=weights)
        return None

    @property
    def _has_vector(self) -> bool:
        return "e" in self.layers

    @property
    def trains_all(self) -> bool:
        return False  # clean trains no classifier, the other cases no decoder

    def tapped(self, net: nn.Module) -> Sequence[str]:
        features = [self.layer] if "A" in self.layers else []
        return [*features, self.embed] if {"e", "E"} & set(self.layers) else features

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> Draw:
        return sample_pairs(self._weights, self.alpha, self.lam_per_sample, batch_size, rng)

    def _mix(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        self._check_net(net, draw)
        if draw.case == "input":
            x = blend_with_partner(x, draw.perm, draw.lam)
        with ExitStack() as taps:
            # Tap both layers in every case: torch.compile ignores hooks added later.
            if "A" in self.layers:
                taps.enter_context(self._tap(net, self.layer, "feat", draw))
            if {"e", "E"} & set(self.layers):
                taps.enter_context(self._tap(net, self.embed, "embed", draw))
            # Keyword arguments only where they are needed: every network has net(x).
            flags: dict[str, Any] = {"decode": True} if draw.case == CLEAN else {}
            flags |= self._noise(draw)
            _check_flags(net, flags)
            out = net(x, **flags)
        if draw.case == CLEAN:
            return Mixed(logits=None, targets=None, extra=self._clean_losses(out))
        return self._mixed(out, y, draw)

    _clean = _mix

    def _tap(self, net: nn.Module, layer: str, stem: str, draw: Draw) -> Any:
        is_mixed = draw.case.rstrip("'") == stem
        if stem == "embed" and self._has_vector:
            action = _mix_vector if is_mixed else _check_vector
            return tap(net, layer, action, layer, draw.perm, draw.lam)
        case = draw.case.replace(stem, "feat") if is_mixed else ""
        return self._by_layer[stem].tap(net, case, draw.perm, draw.lam)

    def _noise(self, draw: Draw) -> dict[str, Tensor]:
        """Return further arguments of the network."""
        return {}

    def _clean_losses(self, decoded: Any) -> dict[str, Tensor]:
        error = widened(decoded.output) - widened(decoded.target)
        return {"reconstruction": self.reconstruction_weight * error.square().mean()}

    def _check_net(self, net: nn.Module, draw: Draw) -> None:
        if draw.case == CLEAN and getattr(plain_module(net), "decoder", None) is None:
            raise ValueError(
                f"the clean case needs a decoder, but this {type(plain_module(net)).__name__} has "
                "none: build an AutoencodingClassifier with decoder=True, or set clean=False"
            )
        is_variational = getattr(plain_module(net), "variational", None)
        if is_variational is not None and is_variational != self._is_variational:
            wanted = "AlignMixupVAE" if is_variational else "AlignMixupAE"
            raise ValueError(
                f"a network with variational={is_variational} needs {wanted}, got "
                f"{type(self).__name__}: change one of them"
            )


def _check_flags(net: nn.Module, flags: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless the network's forward takes these arguments."""
    if not flags:
        return
    taken = inspect.signature(plain_module(net).forward).parameters
    missing = [name for name in flags if name not in taken]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise ValueError(
            f"{type(plain_module(net)).__name__}.forward has no arguments {missing}: use an "
            "AutoencodingClassifier, or AlignMixup, which needs none"
        )


def _mix_vector(output: Tensor, layer: str, perm: Tensor, lam: Tensor) -> Tensor:
    return blend_with_partner(_check_vector(output, layer, perm, lam), perm, lam)


def _check_vector(output: Tensor, layer: str, perm: Tensor, lam: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim != 2:
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"layer {layer!r} returns {got}, but 'e' is a vector [b, d]: mix it as 'E', or use a "
            "network with a vector embedding"
        )
    check_rows(output, layer, len(perm))
    return output


@dataclass(frozen=True, slots=True, eq=False)
class NoiseDraw(Draw):
    """A draw with standard normal noise for the variational code."""

    noise: Float[Tensor, "b d"]


@register_mixer
@dataclass(frozen=True)
class AlignMixupVAE(AlignMixupAE):
    """AlignMixup/VAE: the variational form of ``AlignMixupAE``.

    ``"e"`` is the pair (mu, sigma) and ``"E"`` the pair (M, Sigma); both halves are mixed together,
    with one plan if they are aligned. In training the code is sampled in every case by ``net(x,
    noise=...)``; in evaluation the classifier reads mu. The noise is part of the draw, so a resumed
    run repeats it.

    The settings that are not listed here are those of ``AlignMixupAE``.

    Args:
        embedding_dim: Length of the code, the network's ``code_dim``: 512 for vectors and for 128 x
            2 x 2 tensors.
        kl_weight: Weight of the KL divergence, which is divided by the number of pixel values like
            the reconstruction error.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        ```python
        from alignmixup.models import AutoencodingClassifier

        net = AutoencodingClassifier(model, image_size=32, variational=True)
        am.AlignMixupVAE()(net, x, y).loss().backward()
        ```
    """

    _is_variational: ClassVar[bool] = True

    embedding_dim: int = 512
    kl_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, 1, "embedding_dim")
        check_nonnegative(self, "kl_weight")

    def draw(self, batch_size: int, rng: torch.Generator, progress: float = 0.0) -> NoiseDraw:
        plain = super().draw(batch_size, rng, progress)
        noise = sample_normal((batch_size, self.embedding_dim), rng)
        return NoiseDraw(plain.case, plain.perm, plain.lam, noise)

    def _noise(self, draw: Draw) -> dict[str, Tensor]:
        return {"noise": require(draw, NoiseDraw, self).noise}

    def _clean_losses(self, decoded: Any) -> dict[str, Tensor]:
        losses = super()._clean_losses(decoded)
        kl = gaussian_kl(widened(decoded.mean), widened(decoded.deviation)).mean()
        weight = self.reconstruction_weight * self.kl_weight / decoded.target[0].numel()
        return {**losses, "kl": weight * kl}


def gaussian_kl(
    mean: Float[Tensor, "b *rest"], deviation: Float[Tensor, "b *rest"]
) -> Float[Tensor, " b"]:
    """Return KL(N(mu, sigma^2) || N(0, 1)) of each sample, summed over its dimensions."""
    each = (mean.square() + deviation.square() - 1) / 2 - deviation.log()
    return each.flatten(1).sum(1)
