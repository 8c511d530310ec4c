"""The Triton backend: which kernel solves, mixes and differentiates which shape.

Up to 64 positions everything is one launch with all iterations in registers; from there to 1024 it
is three: cost, iterations, interpolation. Nothing here waits for the device or allocates but
through torch, so that all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from alignmixup.ot import _triton_large, _triton_product, _triton_small
from alignmixup.ot._triton_common import INTERPRETED

__all__ = ["align_mix", "align_mix_backward", "refusal", "solve"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Say why these kernels cannot run on ``size`` positions of ``dtype``; None where they can."""
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, or TRITON_INTERPRET=1 set at the start, got {device}"
    if dtype not in DTYPES:
        return f"it computes in float32, got {dtype}; use 'reference'"
    if size > _triton_large.MAX_POSITIONS:
        return f"it handles {_triton_large.MAX_POSITIONS} positions at most, got {size}"
    return None


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and how many iterations each of them took [...]."""
    if last == "rows":  # the same problem with its two sides exchanged
        plan, used = solve(cost.transpose(-2, -1), eps, num_iters, tol, "columns")
        return plan.transpose(-2, -1), used
    n, m = cost.shape[-2:]
    flat = cost.reshape(-1, n, m)
    if len(flat) == 0:
        return cost.clone(), torch.zeros(cost.shape[:-2], dtype=torch.int32, device=cost.device)
    is_small = max(n, m) <= _triton_small.MAX_POSITIONS
    with _device_of(cost):
        solver = _triton_small.solve if is_small else _triton_large.solve
        plan, used = solver(flat, eps, num_iters, tol)
    return plan.view(cost.shape), used.view(cost.shape[:-2])


def _device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's GPU the current one: that is where Triton launches."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]


def align_mix(
    features: Tensor,
    perm: Tensor,
    lam: Tensor,
    keep_partner: bool,
    eps: float,
    num_iters: int,
    tol: float | None,
    last: str,
) -> tuple[Tensor, Tensor]:
    """Return the mixed features [b, n, c], like the input in memory, and the plans [b, n, n]."""
    b, n, _ = features.shape
    if features.numel() == 0:
        return torch.empty_like(features), lam.new_zeros(b, n, n)
    perm = perm.contiguous()
    with _device_of(features):
        if n <= _triton_small.MAX_POSITIONS:
            return _triton_small.align_mix(
                features, perm, lam, keep_partner, eps, num_iters, tol, last
            )
        plan = _triton_large.align_plan(features, perm, eps, num_iters, tol, last)
        return _triton_product.mix(features, perm, lam, plan, keep_partner), plan


def align_mix_backward(
    grad: Tensor, perm: Tensor, lam: Tensor, plan: Tensor, keep_partner: bool
) -> Tensor:
    """Return the gradient by the features, like ``grad`` in memory."""
    if grad.numel() == 0:
        return torch.empty_like(grad)
    with _device_of(grad):
        return _triton_product.backward(grad, perm.contiguous(), lam, plan, keep_partner)
