"""Sinkhorn iterations in the log domain: the readable reference of every other solver.

    u_i = log(1/n) - lse_j(S_ij + v_j),   v_j = log(1/m) - lse_i(S_ij + u_i),   P = exp(S + u + v)

Symbols: S = -C / eps the log-similarity; u, v the logs of the two scalings; lse log-sum-exp; n
rows, m columns. One iteration updates both scalings; ``last`` is the side updated last, whose
marginal is exact in the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and the number of iterations of each [...].

    ``num_iters = 0`` normalizes the side ``last`` once, as in cross-attention.
    """
    if last == "rows":  # the transposed problem
        plan, used = solve(cost.transpose(-2, -1), eps, num_iters, tol, "columns")
        return plan.transpose(-2, -1), used
    n, m = cost.shape[-2:]
    used = torch.zeros(cost.shape[:-2], dtype=torch.int32, device=cost.device)
    if num_iters == 0:
        S = (cost - cost.amin(-2, keepdim=True)) / -eps
        return S.softmax(-2) / m, used
    S, u, v = _start(cost, eps)
    for iteration in range(num_iters):
        log_rows = (S + v).logsumexp(-1, keepdim=True)  # u + log_rows: log of the current row sums
        new_u = -math.log(n) - log_rows
        new_v = -math.log(m) - (S + new_u).logsumexp(-2, keepdim=True)
        if tol is None:
            u, v, used = new_u, new_v, used + 1
            continue
        # The columns are exact after each iteration, so the error is that of the rows. Converged
        # samples keep their scalings; the number of iterations is fixed, so nothing synchronizes.
        error = ((u + log_rows).exp() - 1 / n).abs().sum((-2, -1))
        moving = (error > tol) | (iteration == 0)
        u = torch.where(moving[..., None, None], new_u, u)
        v = torch.where(moving[..., None, None], new_v, v)
        used = used + moving
    return (S + u + v).exp(), used


def _start(cost: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return S, u, v equivalent to the start u = v = 0, without loss of float32 digits.

    The scalings absorb any constant of a row or a column. Subtracting the least cost of each before
    the division leaves the relevant entries near zero, where float32 has digits, and the difference
    of two close floats is exact. The column constants are added to v; the row constants cancel in
    the first update of u.
    """
    cost = cost - cost.amin(-1, keepdim=True)
    least = cost.amin(-2, keepdim=True)
    return (cost - least) / -eps, cost.new_zeros(*cost.shape[:-1], 1), least / -eps
