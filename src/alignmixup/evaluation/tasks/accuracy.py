"""Top-1 and top-5 accuracy, in percent.

One number for one set of weights. Which epoch's weights (best, last, median of the last ten) is the
caller's choice and belongs beside the number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from alignmixup.contracts import Result
from alignmixup.evaluation.forward import (
    ALONE,
    Batches,
    Forward,
    Normalization,
    Predictions,
    amp_name,
    own_logits,
)
from alignmixup.registry import register_task
from alignmixup.training.distributed import Team


@register_task("accuracy", about="top-1 and top-5 accuracy")
def accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
    team: Team = ALONE,
) -> list[Result]:
    """Return ``top1``, ``top1_error`` and, for five or more classes, ``top5``, in percent."""
    hits = count_hits(Forward(model, normalized_by, amp_dtype), batches, team)
    settings = {
        "num_images": hits.num_images,
        "num_classes": hits.num_classes,
        "amp_dtype": amp_name(amp_dtype),
    }
    values = hits.percentages()
    return [Result("accuracy", metric, value, settings) for metric, value in values.items()]


@dataclass(frozen=True)
class Hits:
    """How many images have their label as the best logit, and among the best five."""

    num_images: int
    num_classes: int
    top1: int
    top5: int

    def percentages(self) -> dict[str, float]:
        """Return the accuracies by their names."""
        n = self.num_images
        values = {"top1": 100 * self.top1 / n, "top1_error": 100 * (n - self.top1) / n}
        if self.num_classes >= 5:
            values["top5"] = 100 * self.top5 / n
        return values


def count_hits(forward: Forward, batches: Batches, team: Team = ALONE) -> Hits:
    """Count the images that a model labels right, in the shares of all processes of ``team``."""
    own = own_logits(forward, batches, team)
    hits = _hits(own) if len(own.labels) else Hits(0, 0, 0, 0)
    counts = (hits.num_images, hits.top1, hits.top5)
    num_images, top1, top5 = team.total(counts, own.labels.device)
    # Rank 0 has images if there are any.
    return Hits(num_images, team.from_rank_zero(hits.num_classes), top1, top5)


def _hits(of: Predictions) -> Hits:
    n, k = of.logits.shape
    labels = of.labels.unsqueeze(1)
    own, classes = of.logits.gather(1, labels), torch.arange(k, device=labels.device)
    # Of equal logits the first class is ahead, as in argmax; topk returns any of them.
    is_ahead = (of.logits > own) | ((of.logits == own) & (classes < labels))
    place = is_ahead.sum(dim=1)
    return Hits(n, k, int((place < 1).sum()), int((place < 5).sum()))
