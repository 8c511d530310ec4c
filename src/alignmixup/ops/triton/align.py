"""The Triton backend of ``align_mix`` and ``sinkhorn``: the choice of kernels by shape.

Up to 32 positions there is one launch; up to 1024 there are three: cost, iterations (in registers
up to 256 positions), interpolation. The iterations are those that ``ops/size_classes.py`` names if
it has the size class switched on, and otherwise, or for a cost of few columns, those of
``sinkhorn_small.py`` (up to 64 positions) and ``sinkhorn_large.py``. Nothing synchronizes, and all
memory is allocated by torch, so everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from alignmixup.ops.size_classes import HeldTiling, RowTiling, SizeClass, size_class
from alignmixup.ops.triton import (
    cost as _triton_cost,
    product as _triton_product,
    sinkhorn_held as _triton_held,
    sinkhorn_large as _triton_large,
    sinkhorn_rows as _triton_rows,
    sinkhorn_small as _triton_small,
)


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and the number of iterations of each [...]."""
    if last == "rows":  # the transposed problem
        plan, used = solve(cost.transpose(-2, -1), eps, num_iters, tol, "columns")
        return plan.transpose(-2, -1), used
    n, m = cost.shape[-2:]
    flat = cost.reshape(-1, n, m)
    if len(flat) == 0:
        return cost.clone(), torch.zeros(cost.shape[:-2], dtype=torch.int32, device=cost.device)
    entry = size_class(max(n, m))
    if entry and isinstance(entry.rows, RowTiling) and not _triton_rows.can_exchange(entry.rows, m):
        entry = None  # far fewer columns than rows
    plan = cost.new_empty(flat.shape) if entry else torch.empty_like(flat)
    with _device_of(cost):
        if entry:
            costs = flat.contiguous()[None]
            used = _iterate(costs, plan, eps, num_iters, tol, entry)
        else:
            used = _fill(plan, _padded(flat), eps, num_iters, tol)
    return plan.view(cost.shape), used.view(cost.shape[:-2])


def _padded(cost: Tensor) -> Tensor:
    """Return costs [b, n, m] in the layout of the solver for their size, [parts, b, n, length]."""
    n, m = cost.shape[-2:]
    if max(n, m) <= _triton_small.MAX_POSITIONS:
        return cost[None]
    costs = cost.new_empty(1, len(cost), n, _triton_cost.row_length(m))
    costs[0, :, :, :m].copy_(cost)
    return costs


def _iterate(
    costs: Tensor, plan: Tensor, eps: float, num_iters: int, tol: float | None, entry: SizeClass
) -> Tensor:
    """Fill ``plan`` [b, n, m] by the kernels of a size class; return the numbers of iterations."""
    if isinstance(entry.rows, HeldTiling):
        return _triton_held.solve(costs, plan, eps, num_iters, tol, entry.rows)
    return _triton_rows.solve(costs, plan, eps, num_iters, tol, entry.rows)


def _fill(plan: Tensor, costs: Tensor, eps: float, num_iters: int, tol: float | None) -> Tensor:
    """Fill ``plan`` [b, n, m] by the solver for its size; return the numbers of iterations."""
    if max(plan.shape[1:]) <= _triton_small.MAX_POSITIONS:
        return _triton_small.solve(costs, plan, eps, num_iters, tol)
    return _triton_large.solve(costs[0], plan, eps, num_iters, tol)


def _device_of(x: Tensor) -> AbstractContextManager[None]:
    """Make the tensor's GPU the current one, on which Triton launches."""
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
    half: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the mixed features [b, n, c] in the layout of the input, and the plans [b, n, n].

    ``half`` multiplies float32 features as if they were bf16; up to 32 positions it gains nothing.
    """
    b, n, _ = features.shape
    if features.numel() == 0:
        return torch.empty_like(features), lam.new_zeros(b, n, n)
    perm = perm.contiguous()
    with _device_of(features):
        if n <= _triton_small.MAX_FUSED:
            return _triton_small.align_mix(
                features, perm, lam, keep_partner, eps, num_iters, tol, last
            )
        entry = size_class(n)
        if entry:
            return _align_mix_by_rows(
                features, perm, lam, keep_partner, eps, num_iters, tol, last, half, entry
            )
        costs = _triton_cost.pair_costs(features, perm, exchanged=last == "rows", half=half)
        plan = torch.empty(b, n, n, dtype=torch.float32, device=features.device)
        # If the rows come last, the solver fills the transposed plan.
        target = plan.transpose(1, 2) if last == "rows" else plan
        _fill(target, costs, eps, num_iters, tol)
        return _triton_product.mix(features, perm, lam, plan, keep_partner, half), plan


def _align_mix_by_rows(
    features: Tensor,
    perm: Tensor,
    lam: Tensor,
    keep_partner: bool,
    eps: float,
    num_iters: int,
    tol: float | None,
    last: str,
    half: bool,
    entry: SizeClass,
) -> tuple[Tensor, Tensor]:
    """The same with the costs as the memory of the plan: transposed if the rows come last."""
    costs = _triton_cost.pair_costs(
        features, perm, exchanged=last == "rows", half=half, entry=entry
    )
    # Several partial sums are freed; a single one becomes the plan.
    plan = torch.empty_like(costs[0]) if len(costs) > 1 else costs[0]
    _iterate(costs, plan, eps, num_iters, tol, entry)
    del costs
    if last == "rows":
        plan = plan.transpose(1, 2)
    return _triton_product.mix(features, perm, lam, plan, keep_partner, half, entry), plan


def align_mix_backward(
    grad: Tensor, perm: Tensor, lam: Tensor, plan: Tensor, keep_partner: bool, half: bool = False
) -> Tensor:
    """Return the gradient of the features in the layout of ``grad``."""
    if grad.numel() == 0:
        return torch.empty_like(grad)
    half = half and grad.shape[1] > _triton_small.MAX_FUSED  # as the forward pass
    with _device_of(grad):
        return _triton_product.backward(grad, perm.contiguous(), lam, plan, keep_partner, half)
