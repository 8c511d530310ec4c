"""AlignMixup/AE and AlignMixup/VAE (Venkataramanan et al. 2022): mixing beside an autoencoder.

    A = F(x),   e = f(A),   logits = g(e),   x^ = D(e)

For each batch one case is drawn:

    clean           L_r = |x - x^|^2 on the images as they are: trains F, f and D
    input           the images are mixed                  \\
    feat, feat'     A is mixed, after alignment            |  L_c on g(e): trains F, f and g
    embed           the vector e is mixed                  |
    embed, embed'   the tensor E is mixed, after alignment /

The classifier never sees a decoded image, and the decoder never sees a mixed one. In the
variational form e is the pair (mu, sigma), mixed together, and

    z = mu + sigma noise,   L_r + KL(N(mu, sigma^2) || N(0, 1))

takes its place in front of g and D; without noise, as in evaluation, z is mu.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Draw, Mixed, Mixer
from alignmixup.hooks import check_layer_name, check_rows, plain_module, tap
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.layersets import CLEAN, Layer, cases_of, check_layers, is_kept_partner
from alignmixup.mixers.sampling import check_weights, probabilities, sample_pairs
from alignmixup.ops.blend import Loss, blend_with_partner, check_batch, check_case, mixed_batch
from alignmixup.ops.sinkhorn import Backend, Side
from alignmixup.registry import register_mixer

__all__ = ["AlignMixupAE", "AlignMixupVAE", "NoiseDraw", "gaussian_kl"]


@register_mixer
@dataclass(frozen=True)
class AlignMixupAE(Mixer):
    """AlignMixup/AE: mix images, features or embeddings, and reconstruct clean images in one case.

    For an ``AutoencodingClassifier``, or any network with the layers ``layer`` and ``embed`` and a
    ``decoder`` that ``net(x, decode=True)`` runs. Only what ``layers`` and ``clean`` need must
    exist: ``AlignMixupAE(layers=("x", "A", "e"), clean=False)`` is AlignMixup with e mixed as well.

    The reconstruction error is the mean squared error over images and pixel values, in units of the
    standard deviation of the data; the paper's sum is this times the number of values. As a mean it
    has the scale of the classification loss, which shares its learning rate.

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
        last: The marginal of the plan that is exact; None chooses the one that keeps the mean.
        backend: Solver of the transport problems; ``"auto"`` chooses by device.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.

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
        check_layer_name(self.embed)
        check_layers(self.layers)
        if self.weights is not None:
            check_weights(self.weights, cases_of(self.layers, clean=self.clean))
        if not 0 < self.reconstruction_weight < math.inf:
            raise ValueError(
                "reconstruction_weight must be positive and finite, got "
                f"{self.reconstruction_weight}; to leave the decoder out set clean=False"
            )
        _ = self._by_layer  # checks what AlignMixup checks: alpha, eps, num_iters, ...

    @cached_property
    def _by_layer(self) -> dict[str, AlignMixup]:
        """How the tensor of each tapped layer is mixed."""

        def at(layer: str, resolution: int | None) -> AlignMixup:
            return AlignMixup(
                layer=layer,
                alpha=self.alpha,
                eps=self.eps,
                num_iters=self.num_iters,
                tol=self.tol,
                aligned=self.aligned,
                resolution=resolution,
                last=self.last,
                backend=self.backend,
                loss=self.loss,
            )

        return {"feat": at(self.layer, self.resolution), "embed": at(self.embed, None)}

    @property
    def _weights(self) -> dict[str, float]:
        if self.weights is not None:
            return self.weights
        return dict.fromkeys(cases_of(self.layers, clean=self.clean), 1.0)

    @property
    def cases(self) -> Mapping[str, float]:
        return probabilities(self._weights)

    @property
    def feature_mixer(self) -> AlignMixup | None:
        """The settings by which A is aligned, or E where A is not mixed; None without either."""
        cases = self.cases
        for stem, mixer in self._by_layer.items():
            weights = {"feat": cases.get(stem, 0.0), "feat'": cases.get(f"{stem}'", 0.0)}
            if (
                self.aligned
                and any(weights.values())
                and not (stem == "embed" and self._has_vector)
            ):
                return replace(mixer, weights=weights)
        return None

    @property
    def _has_vector(self) -> bool:
        return "e" in self.layers

    @property
    def trains_all(self) -> bool:
        return False  # the clean case trains no classifier, the others no decoder

    def draw(self, batch_size: int, rng: torch.Generator) -> Draw:
        return sample_pairs(self._weights, self.alpha, self.lam_per_sample, batch_size, rng)

    def apply(self, net: nn.Module, x: Tensor, y: Tensor, draw: Draw) -> Mixed:
        draw = draw.to(x.device)
        check_batch(x, y, draw.perm, draw.lam)
        check_case(draw.case, cases_of(self.layers, clean=self.clean))
        self._check_net(net, draw)
        if draw.case == "input":
            x = blend_with_partner(x, draw.perm, draw.lam)
        with ExitStack() as taps:
            # All layers are tapped in every case: a compiled module must know them all at once.
            if "A" in self.layers:
                taps.enter_context(self._tap(net, self.layer, "feat", draw))
            if {"e", "E"} & set(self.layers):
                taps.enter_context(self._tap(net, self.embed, "embed", draw))
            # Flags by name, and only where they are needed: any network has net(x).
            flags: dict[str, Any] = {"decode": True} if draw.case == CLEAN else {}
            flags |= self._noise(draw)
            _check_flags(net, flags)
            out = net(x, **flags)
        if draw.case == CLEAN:
            return Mixed(logits=None, targets=None, extra=self._clean_losses(out))
        return mixed_batch(out, y, draw.perm, draw.lam, self.loss)

    def _tap(self, net: nn.Module, layer: str, stem: str, draw: Draw) -> Any:
        is_vector = stem == "embed" and self._has_vector
        case = draw.case if draw.case.rstrip("'") == stem else ""
        if is_vector:
            action = _mix_vector if case else _check_vector
            return tap(net, layer, action, layer, draw.perm, draw.lam)
        keep = "feat'" if is_kept_partner(case) else "feat"
        return self._by_layer[stem].tap(net, keep if case else "", draw.perm, draw.lam)

    def _noise(self, draw: Draw) -> dict[str, Tensor]:
        """What the network is given besides the images."""
        return {}

    def _clean_losses(self, decoded: Any) -> dict[str, Tensor]:
        error = _wide(decoded.output) - _wide(decoded.target)
        return {"reconstruction": self.reconstruction_weight * error.square().mean()}

    def _check_net(self, net: nn.Module, draw: Draw) -> None:
        if draw.case == CLEAN and getattr(plain_module(net), "decoder", None) is None:
            raise ValueError(
                f"the clean case needs a decoder, and this {type(plain_module(net)).__name__} has "
                "none: build an AutoencodingClassifier with decoder=True, or set clean=False"
            )
        is_variational = getattr(plain_module(net), "variational", None)
        if is_variational is not None and is_variational != self._is_variational:
            wanted = "AlignMixupVAE" if is_variational else "AlignMixupAE"
            raise ValueError(
                f"the network has variational={is_variational}, which is for {wanted}, "
                f"not for {type(self).__name__}: change one of them"
            )


def _check_flags(net: nn.Module, flags: Mapping[str, Any]) -> None:
    """Raise where the network's forward does not take these arguments."""
    if not flags:
        return
    taken = inspect.signature(plain_module(net).forward).parameters
    missing = [name for name in flags if name not in taken]
    if missing and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise ValueError(
            f"{type(plain_module(net)).__name__}.forward takes no {missing}: give the mixer an "
            "AutoencodingClassifier, or a network that takes them; AlignMixup needs no such thing"
        )


def _mix_vector(output: Tensor, layer: str, perm: Tensor, lam: Tensor) -> Tensor:
    return blend_with_partner(_check_vector(output, layer, perm, lam), perm, lam)


def _check_vector(output: Tensor, layer: str, perm: Tensor, lam: Tensor) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim != 2:
        what = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"layer {layer!r} gives {what}, but 'e' stands for a vector [b, d]: mix it as 'E', or "
            "give the network a vector embedding"
        )
    check_rows(output, layer, len(perm))
    return output


def _wide(x: Tensor) -> Tensor:
    """At least float32: squares of a bf16 difference keep two digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class NoiseDraw(Draw):
    """A draw with the standard normal noise of a variational code."""

    noise: Float[Tensor, "b d"]


@register_mixer
@dataclass(frozen=True)
class AlignMixupVAE(AlignMixupAE):
    """AlignMixup/VAE: the variational form of ``AlignMixupAE``.

    ``"e"`` stands for the pair (mu, sigma) and ``"E"`` for (M, Sigma); both halves are mixed
    together, with one plan where they are aligned. In training the code is sampled in every case by
    ``net(x, noise=...)``; in evaluation the classifier reads mu. The noise is part of the draw, so
    a resumed run repeats it.

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
        last: The marginal of the plan that is exact; None chooses the one that keeps the mean.
        backend: Solver of the transport problems; ``"auto"`` chooses by device.
        loss: ``"ce"`` for cross-entropy, ``"bce"`` for binary cross-entropy of the softmax.
        embedding_dim: Length of the code, the network's ``code_dim``: 512 for vectors and for 128 x
            2 x 2 tensors.
        kl_weight: Weight of the KL divergence, which is divided by the number of pixel values as
            the reconstruction error is.

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
        if self.embedding_dim < 1:
            raise ValueError(f"embedding_dim must be at least 1, got {self.embedding_dim}")
        if not 0 <= self.kl_weight < math.inf:
            raise ValueError(f"kl_weight must be 0 or more and finite, got {self.kl_weight}")

    def draw(self, batch_size: int, rng: torch.Generator) -> NoiseDraw:
        plain = super().draw(batch_size, rng)
        noise = torch.randn(batch_size, self.embedding_dim, generator=rng, device=rng.device)
        return NoiseDraw(plain.case, plain.perm, plain.lam, noise)

    def _noise(self, draw: Draw) -> dict[str, Tensor]:
        if not isinstance(draw, NoiseDraw):
            raise ValueError("AlignMixupVAE needs a draw with noise: use its own draw()")
        return {"noise": draw.noise}

    def _clean_losses(self, decoded: Any) -> dict[str, Tensor]:
        losses = super()._clean_losses(decoded)
        kl = gaussian_kl(_wide(decoded.mean), _wide(decoded.deviation)).mean()
        weight = self.reconstruction_weight * self.kl_weight / decoded.target[0].numel()
        return {**losses, "kl": weight * kl}


def gaussian_kl(
    mean: Float[Tensor, "b *rest"], deviation: Float[Tensor, "b *rest"]
) -> Float[Tensor, " b"]:
    """KL(N(mu, sigma^2) || N(0, 1)) of each sample, summed over its independent numbers."""
    each = (mean.square() + deviation.square() - 1) / 2 - deviation.log()
    return each.flatten(1).sum(1)
