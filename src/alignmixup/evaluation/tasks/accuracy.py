"""Top-1 and top-5 accuracy, in percent.

One number for one set of weights. Which epoch's weights (best, last, median of the last ten) is the
caller's choice and belongs beside the number.
"""

from __future__ import annotations

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
    logits, labels = collect_logits(model, batches, normalized_by, amp_dtype)
    n, k = logits.shape
    settings = {"num_images": n, "num_classes": k, "amp_dtype": amp_name(amp_dtype)}
    num_right = int((logits.argmax(dim=1) == labels).sum())
    values = {"top1": 100 * num_right / n, "top1_error": 100 * (n - num_right) / n}
    if k >= 5:
        among_five = (logits.topk(5, dim=1).indices == labels.unsqueeze(1)).any(dim=1)
        values["top5"] = 100 * int(among_five.sum()) / n
    return [Result("accuracy", metric, value, settings) for metric, value in values.items()]
