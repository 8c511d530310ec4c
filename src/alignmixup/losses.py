"""Labels as rows of class shares, and the losses of logits against them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from alignmixup.fusion import fusible

Criterion = Callable[[Tensor, Tensor], Tensor]


def soft_targets(
    labels: Tensor, num_classes: int, *, multi_label: bool = False
) -> Float[Tensor, "b k"]:
    """Return labels as rows of class shares, in float32 or better.

    Integer labels become one-hot, soft ones pass.

    With ``multi_label`` a row has one value in [0, 1] per class and need not sum to 1; it may be
    made of integers. A network with one logit needs it, with labels ``[b, 1]``.

    On the CPU an integer out of range, or a soft label that does not sum to 1, is a ``ValueError``.
    On a GPU the checks would wait for the device at each step: there an integer out of range fails
    in the device's own index assertion, and sums are not looked at.
    """
    if num_classes == 1 and not (multi_label and labels.ndim == 2):
        raise ValueError(
            "one logit has a softmax of 1 and no class numbers: set loss='sigmoid_bce' and pass "
            "labels [b, 1] of zeros and ones, or let the network return two logits"
        )
    is_checked = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if multi_label and labels.ndim == 2 and not labels.is_floating_point():
        labels = labels.float()
    if labels.is_floating_point():
        if labels.ndim != 2 or labels.shape[1] != num_classes:
            raise ValueError(
                f"soft labels must have shape [b, {num_classes}] to match the logits, "
                f"got {list(labels.shape)}; convert class numbers by labels.long()"
            )
        if is_checked and labels.numel():
            (_check_range if multi_label else _check_sums)(labels)
        return widened(labels)  # half precision would round the shares of a mix
    if labels.ndim != 1:
        raise ValueError(
            f"integer labels must have shape [b], got {list(labels.shape)}: squeeze them, or "
            "pass soft labels as floats"
        )
    labels = labels.long()  # torch has no comparison of uint16
    if is_checked and (problem := label_problem(labels, num_classes)):
        raise ValueError(f"{problem}; check the network's num_classes")
    rows = torch.zeros(len(labels), num_classes, device=labels.device, dtype=torch.float32)
    return rows.scatter_(1, labels.unsqueeze(1), 1.0)


def label_problem(labels: Int[Tensor, " n"], num_classes: int) -> str:
    """Return what is wrong with integer labels, empty if nothing is."""
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    return f"labels must lie in 0..{num_classes - 1}, got {wrong[0]}" if len(wrong) else ""


def _check_sums(labels: Float[Tensor, "b k"]) -> None:
    """Raise where a row is no distribution: the losses are those of one class a sample."""
    off = (labels.detach().double().sum(1) - 1).abs()
    if not float(off.max()) <= max(1e-3, torch.finfo(labels.dtype).eps):
        worst = int(off.argmax())
        raise ValueError(
            f"soft labels must sum to 1 in each row, got {float(labels[worst].double().sum()):.4g} "
            f"in row {worst}; divide each row by its sum, or set loss='sigmoid_bce' for "
            "multi-label targets"
        )


def _check_range(labels: Float[Tensor, "b k"]) -> None:
    """Raise where a value of multi-label targets is no probability."""
    low, high = (float(value) for value in torch.aminmax(labels.detach()))
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"multi-label targets must lie in [0, 1], got values from {low:.4g} to {high:.4g}"
        )


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or better: half precision has too few digits for a loss."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@fusible
def soft_cross_entropy(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Mean over the batch of -sum_k t_k log softmax(z)_k, in float32 or better."""
    wide = widened(logits)
    return -(targets * wide.log_softmax(dim=1)).sum(dim=1).mean()


@fusible
def softmax_bce(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Binary cross-entropy of softmax(z) against soft targets, mean over batch and classes.

    The loss of the manifold mixup, PuzzleMix and Co-Mixup code. log(1 - p_k) is formed from
    log p_k by expm1, so that a confident prediction does not round to log 0.
    """
    wide = widened(logits)
    log_p = wide.log_softmax(dim=1)
    # 1 - p_k = -expm1(log p_k); the clamp keeps the gradient finite where p_k rounds to one.
    tiny = torch.finfo(wide.dtype).eps
    log_q = torch.log(-torch.expm1(log_p.clamp(max=-tiny)))
    return -(targets * log_p + (1 - targets) * log_q).mean()


@fusible
def sigmoid_bce(logits: Float[Tensor, "b k"], targets: Float[Tensor, "b k"]) -> Tensor:
    """Binary cross-entropy of sigmoid(z), for classes that do not exclude each other.

    Mean over batch and classes, in float32 or better.
    """
    wide = widened(logits)
    return F.binary_cross_entropy_with_logits(wide, targets.to(wide.dtype))
