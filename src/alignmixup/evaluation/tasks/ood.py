"""Out-of-distribution (OOD) detection: how well a score of the logits tells two sets apart.

    max_softmax  q(x) = max_k softmax(z)_k          (Hendrycks and Gimpel; the paper's score)
    energy       q(x) = log sum_k exp z_k           entropy   q(x) = sum_k p_k log p_k

Higher means more in-distribution (ID) for all of them; an image with q >= delta is called ID. All
figures are exact, from sorted scores in float64 (float32 rounds many confident scores to one, and
ties are worth half), and in percent:

    det_acc_half  mean of P_ID(q >= 0.5) and P_OOD(q < 0.5), as the paper says; max_softmax alone
    det_acc_best  1 - min_delta 0.5 [P_ID(q < delta) + P_OOD(q >= delta)], as ODIN defines it
    auroc         P(q_ID > q_OOD) + 0.5 P(q_ID = q_OOD)
    aupr_id       average precision with ID positive;   aupr_ood  with OOD positive, score -q
    fpr95         P_OOD(q >= delta) at the largest delta with P_ID(q >= delta) >= 0.95

``prior="balanced"`` forms precision from rates, as the ODIN code does, so that the sizes of the
two sets do not matter; ``"empirical"`` from counts, as scikit-learn does. They agree on sets of
equal size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from alignmixup.contracts import Result
from alignmixup.evaluation.forward import (
    ImageBatches,
    Normalisation,
    PixelBatches,
    amp_name,
    pixel_batches,
    predict,
)

__all__ = [
    "SCORES",
    "Noise",
    "NoisyImages",
    "centre_crop",
    "detection_metrics",
    "gaussian_noise",
    "noisy_images",
    "ood",
    "ood_from_logits",
    "resize",
    "uniform_noise",
]

Prior = Literal["balanced", "empirical"]
Size = int | tuple[int, int]  # a square, or height and width


def ood(
    model: nn.Module,
    id_batches: ImageBatches,
    ood_batches: ImageBatches | Noise | NoisyImages,
    source: str,
    *,
    score: str = "max_softmax",
    prior: Prior = "balanced",
    normalised_by: Normalisation | None = None,
    amp_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Score both sets and return every metric; ``source`` names the OOD set in the settings.

    Batches are images or (images, anything). ``normalised_by`` holds for both sets, except for
    the noise made in this file, which is pixels and is normalised here for the model.
    """
    id_logits = predict(model, id_batches, normalised_by=normalised_by, amp_dtype=amp_dtype)
    seed = None
    if isinstance(ood_batches, Noise | NoisyImages):
        seed, ood_batches = ood_batches.seed, PixelBatches(ood_batches)
    try:
        ood_logits = predict(model, ood_batches, normalised_by=normalised_by, amp_dtype=amp_dtype)
    except ValueError as error:
        raise ValueError(f"OOD source {source!r}: {error}") from error
    return ood_from_logits(
        id_logits, ood_logits, source, score=score, prior=prior, amp=amp_name(amp_dtype), seed=seed
    )


def ood_from_logits(
    id_logits: Float[Tensor, "n k"],
    ood_logits: Float[Tensor, "m k"],
    source: str,
    *,
    score: str = "max_softmax",
    prior: Prior = "balanced",
    amp: str | None = None,
    seed: int | None = None,
) -> list[Result]:
    """Return the metrics from logits, so that several sources share one pass over the ID set.

    ``seed`` is that of an OOD set made by chance.
    """
    if score not in SCORES:
        raise ValueError(f"unknown score {score!r}; choose from {sorted(SCORES)}")
    id_scores, ood_scores = SCORES[score](id_logits.double()), SCORES[score](ood_logits.double())
    settings: dict[str, object] = {
        "source": source,
        "score": score,
        "prior": prior,
        "num_id": len(id_scores),
        "num_ood": len(ood_scores),
        "amp_dtype": amp,
    }
    if seed is not None:
        settings["seed"] = seed
    values = detection_metrics(id_scores, ood_scores, prior=prior)
    if score == "max_softmax":  # the paper's detection accuracy, before ODIN's
        right = (id_scores >= 0.5).double().mean() + (ood_scores < 0.5).double().mean()
        values = {"det_acc_half": 50 * float(right), **values}
    return [Result("ood", metric, value, settings) for metric, value in values.items()]


def _max_softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=1).amax(dim=1)


def _energy(logits: Tensor) -> Tensor:
    return logits.logsumexp(dim=1)


def _negative_entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(dim=1)
    return (log_p.exp() * log_p).sum(dim=1)


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max_softmax": _max_softmax,
    "energy": _energy,
    "entropy": _negative_entropy,
}


def detection_metrics(
    id_scores: Float[Tensor, " n"], ood_scores: Float[Tensor, " m"], *, prior: Prior = "balanced"
) -> dict[str, float]:
    """Return the metrics that need no fixed threshold, in percent, from any two sets of scores."""
    if not len(id_scores) or not len(ood_scores):
        raise ValueError(
            f"both sets need images, got {len(id_scores)} in-distribution and "
            f"{len(ood_scores)} out-of-distribution"
        )
    if prior not in ("balanced", "empirical"):
        raise ValueError(f"prior must be 'balanced' or 'empirical', got {prior!r}")
    if not (id_scores.isfinite().all() and ood_scores.isfinite().all()):
        raise ValueError("scores must be finite; check the model's logits")
    inside, outside = id_scores.double().sort().values, ood_scores.double().sort().values
    values = {
        "det_acc_best": _best_accuracy(inside, outside),
        "auroc": _auroc(inside, outside),
        "aupr_id": _average_precision(inside, outside, prior),
        "aupr_ood": _average_precision(-outside.flip(0), -inside.flip(0), prior),
        "fpr95": _false_positive_rate(inside, outside, percent=95),
    }
    return {metric: 100 * value for metric, value in values.items()}


# The four below take scores sorted upwards. The count of scores below v is a search in them.


def _best_accuracy(inside: Tensor, outside: Tensor) -> float:
    # The best delta may be taken at an ID score: raising it up to the next one loses no ID image.
    # Above all scores every image is called OOD, which is right in half of the balanced cases.
    id_lost = torch.searchsorted(inside, inside).double() / len(inside)
    ood_kept = 1 - torch.searchsorted(outside, inside).double() / len(outside)
    return max(0.5, 1 - 0.5 * float((id_lost + ood_kept).min()))


def _auroc(inside: Tensor, outside: Tensor) -> float:
    below = torch.searchsorted(outside, inside).double().mean()
    up_to = torch.searchsorted(outside, inside, right=True).double().mean()
    return float(below + up_to) / 2 / len(outside)


def _average_precision(positive: Tensor, negative: Tensor, prior: Prior) -> float:
    # Each positive adds 1/n of recall at the precision of its own score, ties included.
    true = len(positive) - torch.searchsorted(positive, positive).double()
    false = len(negative) - torch.searchsorted(negative, positive).double()
    if prior == "balanced":
        true, false = true / len(positive), false / len(negative)
    return float((true / (true + false)).mean())


def _false_positive_rate(inside: Tensor, outside: Tensor, percent: int) -> float:
    num_kept = -(-percent * len(inside) // 100)  # rounded up, in integers
    delta = inside[len(inside) - num_kept]
    return float((outside >= delta).double().mean())


@dataclass(frozen=True, slots=True)
class Noise:
    """Images of independent pixels, as batches; reading them again gives the same images."""

    kind: Literal["uniform", "gaussian"]
    num_images: int
    size: Size
    seed: int
    mean: float = 0.5
    std: float = 0.5
    batch_size: int = 250
    channels: int = 3

    def __post_init__(self) -> None:
        if min(self.num_images, *self.shape(), self.batch_size) < 1:
            raise ValueError(
                f"noise needs at least one image, channel, pixel and image a batch, got num_images="
                f"{self.num_images}, channels={self.channels}, size={self.size}, "
                f"batch_size={self.batch_size}"
            )

    def shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image."""
        return (self.channels, *_sides(self.size))

    def __iter__(self) -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        for first in range(0, self.num_images, self.batch_size):
            b = min(self.batch_size, self.num_images - first)
            noise = _draw(self.kind, (b, *self.shape()), rng, self.mean, self.std)
            yield noise.clamp(0, 1)


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _draw(
    kind: str, shape: tuple[int, ...], rng: torch.Generator, mean: float, std: float
) -> Tensor:
    if kind == "uniform":
        return torch.rand(shape, generator=rng)
    return mean + std * torch.randn(shape, generator=rng)


def uniform_noise(
    num_images: int, size: Size, seed: int, *, batch_size: int = 250, channels: int = 3
) -> Noise:
    """Return images of pixels drawn from U(0, 1)."""
    return Noise("uniform", num_images, size, seed, batch_size=batch_size, channels=channels)


def gaussian_noise(
    num_images: int,
    size: Size,
    seed: int,
    *,
    reading: Literal["paper", "odin"] = "paper",
    batch_size: int = 250,
    channels: int = 3,
) -> Noise:
    """Return images of pixels drawn from a normal distribution and clipped to [0, 1].

    The paper states N(mu, sigma) with mu = sigma = 0.5; ODIN takes N(0.5, 1). For the reading of
    "test images with noise" as noise added to the images see ``noisy_images``.
    """
    if reading not in ("paper", "odin"):
        raise ValueError(f"reading must be 'paper' or 'odin', got {reading!r}")
    std = 0.5 if reading == "paper" else 1.0
    return Noise(
        "gaussian", num_images, size, seed, std=std, batch_size=batch_size, channels=channels
    )


@dataclass(frozen=True, slots=True)
class NoisyImages:
    """Batches of images with noise added in pixel space, clipped to [0, 1]."""

    batches: ImageBatches
    kind: Literal["uniform", "gaussian"]
    seed: int
    normalised_by: Normalisation | None = None

    def __iter__(self) -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        for x, _ in pixel_batches(self.batches, self.normalised_by, device=None):
            noise = _draw(self.kind, tuple(x.shape), rng, 0.5, 0.5)
            yield (x + noise.to(x)).clamp(0, 1)


def noisy_images(
    batches: ImageBatches,
    kind: Literal["uniform", "gaussian"],
    seed: int,
    *,
    normalised_by: Normalisation | None = None,
) -> NoisyImages:
    """Return test images plus noise of U(0, 1) or N(0.5, 0.5): the paper's words read as a sum."""
    if kind not in ("uniform", "gaussian"):
        raise ValueError(f"kind must be 'uniform' or 'gaussian', got {kind!r}")
    return NoisyImages(batches, kind, seed, normalised_by)


def centre_crop(images: Tensor, size: Size) -> Tensor:
    """Return the central ``size`` x ``size`` pixels of images [n, c, h, w], or height x width."""
    h, w = images.shape[-2:]
    height, width = _sides(size)
    if not (1 <= height <= h and 1 <= width <= w):
        raise ValueError(f"cannot crop {height} x {width} pixels from {h} x {w}; resize instead")
    top, left = (h - height) // 2, (w - width) // 2
    return images[..., top : top + height, left : left + width]


def resize(images: Tensor, size: int) -> Tensor:
    """Return images [n, c, h, w] at ``size`` x ``size``, bilinear with antialiasing.

    Bytes come back as bytes, rounded.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}")
    if not len(images):
        raise ValueError("there are no images to resize")
    is_float = images.is_floating_point()
    parts = []
    for first in range(0, len(images), 1024):  # in parts, since bytes become floats on the way
        part = images[first : first + 1024]
        small = F.interpolate(
            part if is_float else part.float(), (size, size), mode="bilinear", antialias=True
        )
        parts.append(small if is_float else small.round().clamp(0, 255).to(images.dtype))
    return torch.cat(parts)
