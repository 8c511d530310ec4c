"""The fused kernels of PuzzleMix and Co-Mixup as operators.

They are opaque to torch.compile and do not synchronize, so a step that calls them can be captured.
Triton is imported when the first of them runs.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("alignmixup::cut_ordered", mutates_args=())
def cut_ordered(
    unary: Tensor,
    down: Tensor,
    right: Tensor,
    num_relaxations: int,
    num_sweeps: int,
    num_roundings: int,
) -> tuple[Tensor, Tensor]:
    """Return the labels [b, n, m] and energies [b] of ``gridcut.cut_ordered``."""
    from alignmixup.ops.triton import gridcut as _triton_gridcut

    unary, down, right = (costs.contiguous() for costs in (unary, down, right))
    with torch.cuda.device_of(unary):  # type: ignore[no-untyped-call]
        return _triton_gridcut.cut(unary, down, right, num_relaxations, num_sweeps, num_roundings)


@cut_ordered.register_fake
def _(unary, down, right, num_relaxations, num_sweeps, num_roundings):  # type: ignore[no-untyped-def]
    b, _, n, m = unary.shape
    return unary.new_empty(b, n, m, dtype=torch.int64), unary.new_empty(b)


@torch.library.custom_op("alignmixup::auction", mutates_args=())
def auction(salient: Tensor, is_shown: Tensor, t_eps: float) -> Tensor:
    """Return the block at each place [b, n * n] after the auction of ``puzzle.transport``."""
    from alignmixup.ops.triton import auction as _triton_auction

    with torch.cuda.device_of(salient):  # type: ignore[no-untyped-call]
        return _triton_auction.auction(salient.contiguous(), is_shown.contiguous(), t_eps)


@auction.register_fake
def _(salient, is_shown, t_eps):  # type: ignore[no-untyped-def]
    return salient.new_empty(len(salient), salient[0].numel(), dtype=torch.int64)


@torch.library.custom_op("alignmixup::joint_assignment", mutates_args=())
def joint_assignment(
    unary: Tensor,
    compatibility: Tensor,
    is_real: Tensor,
    start: Tensor,
    beta: float,
    gamma: float,
    tau: float,
    is_soft: bool,
    num_iters: int,
    num_sweeps: int,
    half_labels: bool,
    resolve_ties: bool,
) -> Tensor:
    """Return the shares [p, N, s, N] of the best restart of ``joint.assign_blocks``."""
    from alignmixup.ops.triton import joint as _triton_joint

    terms = unary.contiguous(), compatibility.contiguous(), is_real.contiguous(), start.contiguous()
    weights = (beta, gamma, tau, is_soft)
    search = (num_iters, num_sweeps, half_labels, resolve_ties)
    with torch.cuda.device_of(unary):  # type: ignore[no-untyped-call]
        return _triton_joint.assign(*terms, *weights, *search)


@joint_assignment.register_fake
def _(unary, compatibility, is_real, start, *settings):  # type: ignore[no-untyped-def]
    p, num, sites = unary.shape
    return unary.new_empty(p, num, sites, num)
