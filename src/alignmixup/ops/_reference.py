"""Sinkhorn's iterations in the log domain, written for reading: what every kernel must reproduce.

    u_i = log(1/n) - lse_j(S_ij + v_j),   v_j = log(1/m) - lse_i(S_ij + u_i),   P = exp(S + u + v)

Symbols: S = -C / eps the log-similarity; u, v the logs of the two scalings; lse log-sum-exp; n
rows, m columns. One iteration updates both scalings, the one named by ``last`` at its end, so that
the marginal it enforces is exact in what comes out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["solve"]


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and how many iterations each of them took [...].

    ``num_iters = 0`` normalises once, what ``last`` names, as cross-attention does.
    """
    if last == "rows":  # the same problem with its two sides exchanged
        plan, used = solve(cost.transpose(-2, -1), eps, num_iters, tol, "columns")
        return plan.transpose(-2, -1), used
    n, m = cost.shape[-2:]
    used = torch.zeros(cost.shape[:-2], dtype=torch.int32, device=cost.device)
    if num_iters == 0:
        S = (cost - cost.amin(-2, keepdim=True)) / -eps
        return S.softmax(-2) / m, used
    S, u, v = _start(cost, eps)
    for iteration in range(num_iters):
        log_rows = (S + v).logsumexp(-1, keepdim=True)  # u + log_rows: log of the row sums so far
        new_u = -math.log(n) - log_rows
        new_v = -math.log(m) - (S + new_u).logsumexp(-2, keepdim=True)
        if tol is None:
            u, v, used = new_u, new_v, used + 1
            continue
        # The columns are exact after each iteration, so the rows alone say how far there is to go.
        # Samples at rest keep their scalings; nothing waits for the device.
        error = ((u + log_rows).exp() - 1 / n).abs().sum((-2, -1))
        moving = (error > tol) | (iteration == 0)
        u = torch.where(moving[..., None, None], new_u, u)
        v = torch.where(moving[..., None, None], new_v, v)
        used = used + moving
    return (S + u + v).exp(), used


def _start(cost: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return S, u, v of the usual start u = v = 0, arranged so that float32 keeps its digits.

    The scalings absorb any constant of a row or a column. Taking the least cost out of each before
    the division leaves the entries that matter near zero, where float32 still has digits, and the
    difference of two close floats is exact. What left the columns goes into v; what left the rows
    is gone with the first update of u.
    """
    cost = cost - cost.amin(-1, keepdim=True)
    least = cost.amin(-2, keepdim=True)
    return (cost - least) / -eps, cost.new_zeros(*cost.shape[:-1], 1), least / -eps
