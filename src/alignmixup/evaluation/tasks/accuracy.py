"""Top-1 and top-5 accuracy, in percent.

One number for one set of weights. Which epoch's weights (best, last, median of the last ten) is the
caller's choice and belongs beside the number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from alignmixup.contracts import Result
from alignmixup.evaluation.forward import Batches, Normalization, amp_name, collect_logits
from alignmixup.registry import register_task


@register_task("accuracy", about="top-1 and top-5 accuracy")
def accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Return ``top1``, ``top1_error`` and, for five or more classes, ``top5``, in percent."""
    hits = count_hits(model, batches, normalized_by=normalized_by, amp_dtype=amp_dtype)
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


def count_hits(
    model: nn.Module,
    batches: Batches,
    *,
    normalized_by: Normalization | None = None,
    amp_dtype: torch.dtype | None = None,
) -> Hits:
    """Count the images that a model labels right: counts of parts of a set add up."""
    logits, labels = collect_logits(model, batches, normalized_by, amp_dtype)
    n, k = logits.shape
    num_right = int((logits.argmax(dim=1) == labels).sum())
    best = logits.topk(min(k, 5), dim=1).indices
    return Hits(n, k, num_right, int((best == labels.unsqueeze(1)).any(dim=1).sum()))
