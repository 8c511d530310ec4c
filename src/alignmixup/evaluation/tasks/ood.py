"""Out-of-distribution (OOD) detection: how well a score of the logits tells two sets apart.

    max_softmax  q(x) = max_k softmax(z)_k          (Hendrycks and Gimpel; the paper's score)
    energy       q(x) = log sum_k exp z_k           entropy   q(x) = sum_k p_k log p_k

Higher is more in-distribution (ID) for all of them; an image with q >= delta is called ID. All
figures are exact, from sorted scores in float64 (float32 rounds many confident scores to one, and
ties are worth half), and in percent:

    det_acc_half  mean of P_ID(q >= 0.5) and P_OOD(q < 0.5), as in the paper; max_softmax only
    det_acc_best  1 - min_delta 0.5 [P_ID(q < delta) + P_OOD(q >= delta)], as ODIN defines it
    auroc         P(q_ID > q_OOD) + 0.5 P(q_ID = q_OOD)
    aupr_id       average precision with ID positive;   aupr_ood  with OOD positive, score -q
    fpr95         P_OOD(q >= delta) at the largest delta with P_ID(q >= delta) >= 0.95

``prior="balanced"`` forms precision from rates, as the ODIN code does, so that the sizes of the
two sets do not matter; ``"empirical"`` from counts, as scikit-learn does. They agree on sets of
equal size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignmixup.contracts import Result, Skipped
from alignmixup.evaluation.forward import (
    ALONE,
    ImageBatches,
    Normalization,
    PixelBatches,
    amp_name,
    check_classes,
    predict,
)
from alignmixup.evaluation.outliers import Outliers
from alignmixup.registry import register_task
from alignmixup.training.distributed import Team

Prior = Literal["balanced", "empirical"]
Score = Literal["max_softmax", "energy", "entropy"]


@register_task("ood", about="detection of images of other data sets and of noise")
def ood(
    model: nn.Module,
    batches: ImageBatches,
    outliers: Iterable[Outliers],
    *,
    score: Score = "max_softmax",
    prior: Prior = "balanced",
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return every metric for each source of outliers; one pass over the ID images serves all.

    Outliers are pixels, whatever ``normalized_by`` says of the ID images. A process of ``team``
    gets its share of both.
    """
    inside = predict(model, batches, normalized_by, amp_dtype, team)
    check_classes(inside)
    results = []
    for source in outliers:
        images = source.read(len(inside))
        if images is None:
            continue
        try:
            shown = PixelBatches(images.__iter__)
            outside = predict(model, shown, normalized_by, amp_dtype, team)
        except ValueError as error:
            raise ValueError(f"out-of-distribution source {source.name!r}: {error}") from error
        amp, seed = amp_name(amp_dtype), source.seed
        results += ood_from_logits(
            inside, outside, source.name, score=score, prior=prior, amp=amp, seed=seed
        )
    if not results:
        raise Skipped("no out-of-distribution images")
    return results


def ood_from_logits(
    id_logits: Float[Tensor, "n k"],
    ood_logits: Float[Tensor, "m k"],
    source: str,
    *,
    score: Score = "max_softmax",
    prior: Prior = "balanced",
    amp: str | None = None,
    seed: int | None = None,
) -> list[Result]:
    """Return the metrics of one source from logits; ``seed`` is that of random outliers."""
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
    values = separation_metrics(id_scores, ood_scores, prior=prior)
    if score == "max_softmax":  # the paper's detection accuracy comes before ODIN's
        right = (id_scores >= 0.5).double().mean() + (ood_scores < 0.5).double().mean()
        values = {"det_acc_half": 50 * float(right), **values}
    histogram = {"histogram": score_histogram(id_scores, ood_scores)}
    return [
        Result("ood", metric, value, settings | histogram if metric == "auroc" else settings)
        for metric, value in values.items()
    ]


def score_histogram(
    id_scores: Float[Tensor, " n"], ood_scores: Float[Tensor, " m"], num_bins: int = 25
) -> dict[str, list[float] | list[int]]:
    """Return the counts of both sets over equal bins: ``edges``, ``id`` and ``ood``."""
    low = float(torch.minimum(id_scores.min(), ood_scores.min()))
    high = float(torch.maximum(id_scores.max(), ood_scores.max()))
    if low == high:  # one bin around the only value
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, num_bins + 1, dtype=torch.float64, device="cpu")
    # Three digits of a bin, and at least six: scores of an untrained network hardly differ.
    digits = max(6, 3 - math.floor(math.log10((high - low) / num_bins)))

    def counts(scores: Tensor) -> list[int]:
        index = torch.bucketize(scores.double().cpu(), edges[1:-1], right=True)
        numbers: list[int] = torch.bincount(index, minlength=num_bins).tolist()
        return numbers

    return {
        "edges": [round(edge, digits) for edge in edges.tolist()],
        "id": counts(id_scores),
        "ood": counts(ood_scores),
    }


def _negative_entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(dim=1)
    return (log_p.exp() * log_p).sum(dim=1)


SCORES: Mapping[Score, Callable[[Tensor], Tensor]] = {
    "max_softmax": lambda logits: logits.softmax(dim=1).amax(dim=1),
    "energy": lambda logits: logits.logsumexp(dim=1),
    "entropy": _negative_entropy,
}


def separation_metrics(
    id_scores: Float[Tensor, " n"], ood_scores: Float[Tensor, " m"], *, prior: Prior = "balanced"
) -> dict[str, float]:
    """Return the metrics that need no fixed threshold, in percent, from two sets of scores."""
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


# The four below take scores in ascending order; searchsorted counts the scores below a value.


def _best_accuracy(inside: Tensor, outside: Tensor) -> float:
    # The best delta is an ID score: raising it to the next one loses no ID image. Above all scores
    # every image is called OOD, which is right in half of the balanced cases.
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
