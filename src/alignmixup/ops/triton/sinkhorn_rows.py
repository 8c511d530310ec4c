# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Kernels for 209 to 1024 positions: a group of programs per sample, each with some of its rows.

    T = S + u + v,   K = exp2(T),   a = (1/n) / (K b),   b = (1/m) / (K' a),   P = a K b

A row belongs to one program, so only column sums are exchanged, once per iteration. T contains the
absorbed scalings and replaces the costs in place; in the end the plan replaces T. So the plan is
the only tensor of n x m entries per sample.

``sinkhorn_shared.py`` keeps K in registers and reads T for absorptions alone.
``sinkhorn_streamed.py`` reads T in blocks of rows in each iteration and computes K again: that
takes less time than the reads from the L2 cache, and K is the same to the bit each time.
"""

import torch
import triton
from torch import Tensor

from alignmixup.ops.size_classes import RowTiling
from alignmixup.ops.triton.common import INTERPRETED, LOG2_E, padded
from alignmixup.ops.triton.norm_relu import _num_processors
from alignmixup.ops.triton.sinkhorn_shared import _shared_kernel
from alignmixup.ops.triton.sinkhorn_streamed import _streamed_kernel


def can_exchange(tiling: RowTiling, m: int) -> bool:
    """Whether each thread of a program has sums of its own among those of ``m`` columns.

    Otherwise several threads would read a word of the exchange each, at different times.
    """
    return tiling.group == 1 or 32 * tiling.num_warps <= padded(m)


def solve(
    costs: Tensor,
    plan: Tensor,
    eps: float,
    num_iters: int,
    tol: float | None,
    tiling: RowTiling,
) -> Tensor:
    """As ``sinkhorn_held.solve``."""
    parts, b, n, m = costs.shape
    device = costs.device
    group = 1 if INTERPRETED else tiling.group  # interpreted programs run one after another
    num_groups = min(b, max(1, _num_processors(device) * tiling.per_sm // group))
    share = triton.cdiv(n, group)
    M = padded(m)
    assert group == 1 or can_exchange(tiling, m), (tiling, m)
    pack = max(1, min(M // (32 * tiling.num_warps), 16 // group))
    used = torch.empty(b, dtype=torch.int32, device=device)
    num_words = num_groups * 2 * group * M if group > 1 else 1
    slots = torch.zeros(num_words, dtype=torch.int64, device=device)
    scalings = costs.new_empty((b, 2, n) if tiling.block else 1)
    kernel = _streamed_kernel if tiling.block else _shared_kernel
    kernel[(num_groups * group,)](
        costs, plan, slots, scalings, used, b, LOG2_E / eps, num_iters, tol or 0.0,
        costs.stride(0), n=n, m=m, SHARE=share, BLOCK_N=tiling.block or padded(share), M=M,
        PARTS=parts, GROUP=group, STAGES=tiling.num_stages, ONCE=num_iters == 0,
        HAS_TOL=tol is not None, WIDTH=tiling.width, PACK=pack, num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers, launch_cooperative_grid=group > 1,
    )  # fmt: skip
    return used
