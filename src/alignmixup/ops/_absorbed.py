"""Sinkhorn's iterations on an absorbed kernel: the plain log-domain ones without exp and log.

    K = exp(S + u + v),   a = (1/n) / (K b),   b = (1/m) / (K' a),   P = diag(a) K diag(b)

Symbols: S, u, v as in the reference; a, b the change of the scalings since u, v were absorbed in K.

**Safety.** log-sum-exp is non-expansive in the largest norm, so the change of the log scalings in
one iteration, d = max |log(n K 1)| right after an absorption, never grows. While d is at most
MAX_CHANGE, the next REACH / d iterations multiply each scaling by at most e^REACH. Entries of K
below e^floor count as zero: they could grow to e^(floor + 2 REACH) at most, which no marginal
notices. Where d is larger, the iteration is done in the log domain; so the results are those of the
plain iteration, up to rounding, for every cost.

**After one iteration d is at most log max(n, m).** Its last half divides each column by m times its
sum s_j, which leaves row i with the sum over j of P_ij / (m s_j). No s_j exceeds the whole mass,
one, so that is at least (1/n) / m; and no P_ij exceeds its s_j, so it is at most one. Hence the
first iteration is done in the log domain and, below some thousands of positions, no other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignmixup.ops import _reference

__all__ = ["MAX_CHANGE", "REACH", "solve"]

MAX_CHANGE = 9.0
REACH = 18.0
# Every product K_ij a_i stays a normal number above this; a CPU is slow with any other, and with
# the exponential that leads there.
FLOORS = {torch.float32: -60.0, torch.float64: -600.0}
# Elements of K handled together on a CPU: K, its transpose and S then stay in a core's own cache.
CHUNK = 2**17


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and how many iterations each of them took [...].

    It asks the device about the safety of each absorption, so a GPU would have to wait for it.
    """
    if last == "rows":  # the same problem with its two sides exchanged
        plan, used = solve(cost.transpose(-2, -1), eps, num_iters, tol, "columns")
        return plan.transpose(-2, -1), used
    if num_iters == 0 or cost.numel() == 0:
        return _reference.solve(cost, eps, num_iters, tol, last)
    n, m = cost.shape[-2:]
    size = max(1, CHUNK // (n * m)) if cost.device.type == "cpu" else cost.numel()
    chunks = torch.split(cost.reshape(-1, n, m), size)
    parts = [_solve_chunk(chunk, eps, num_iters, tol) for chunk in chunks]
    plan = parts[0][0] if len(parts) == 1 else torch.cat([plan for plan, _ in parts])
    used = torch.cat([used for _, used in parts])
    return plan.view(cost.shape), used.view(cost.shape[:-2])


def _solve_chunk(
    cost: Tensor, eps: float, num_iters: int, tol: float | None
) -> tuple[Tensor, Tensor]:
    """Solve [b, n, m] with exact columns: log steps until it is safe, then linear ones."""
    S, _, v = _reference._start(cost, eps)
    u, v = _log_step(S, v)
    floor = FLOORS[S.dtype]
    moving = torch.ones(len(cost), 1, 1, dtype=torch.bool, device=cost.device)
    used = moving.int()
    done = 1
    while True:
        K = (S + u + v).clamp_(min=floor).exp_()
        K = torch.threshold_(K, math.exp(floor) * 1.001, 0.0)
        rows = K.sum(-1, keepdim=True)
        if tol is not None:
            moving = moving & (_error(rows) > tol)
        if done == num_iters or not moving.any():
            return K, used.view(-1)
        steps = min(_safe_steps(rows), num_iters - done)
        if steps == 0:
            new_u, new_v = _log_step(S, v)
            u, v = torch.where(moving, new_u, u), torch.where(moving, new_v, v)
            used, done = used + moving, done + 1
            continue
        a, b, moving, taken = _linear_steps(K, steps, tol, moving)
        used, done = used + taken, done + steps
        if done == num_iters or not moving.any():
            # Not exp(S + u + v) once more: rounding of large u and v would cost the marginals.
            return K.mul_(a.transpose(-2, -1)).mul_(b), used.view(-1)
        u, v = u + a.transpose(-2, -1).log(), v + b.log()


def _log_step(S: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    n, m = S.shape[-2:]
    u = -math.log(n) - _logsumexp(S + v, -1)
    return u, -math.log(m) - _logsumexp(S + u, -2)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """log sum exp, overwriting ``x``; terms below e^floor of the largest add nothing."""
    top = x.amax(dim, keepdim=True)
    return x.sub_(top).clamp_(min=FLOORS[x.dtype]).exp_().sum(dim, keepdim=True).log_().add_(top)


def _error(rows: Tensor) -> Tensor:
    """Distance [b, 1, 1] of row sums, in either shape, from uniform."""
    return (rows - 1 / max(rows.shape[-2:])).abs().sum((-2, -1), keepdim=True)


def _safe_steps(rows: Tensor) -> int:
    """How many linear iterations may follow an absorption with these row sums; 0 for none."""
    low, high = (x.item() * rows.shape[-2] for x in torch.aminmax(rows))
    if not (low >= math.exp(-MAX_CHANGE) and high <= math.exp(MAX_CHANGE)):  # NaN fails too
        return 0
    return int(REACH / max(-math.log(low), math.log(high), 1e-3))


def _linear_steps(
    K: Tensor, steps: int, tol: float | None, moving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale K for ``steps`` iterations: a [b, 1, n], b [b, 1, m], who still moves, steps taken."""
    n, m = K.shape[-2:]
    K_t = K.transpose(-2, -1).contiguous()
    a = K.new_ones(len(K), 1, n)
    b = K.new_ones(len(K), 1, m)
    taken = torch.zeros_like(moving, dtype=torch.int32)
    for step in range(steps):
        rows = _product(b, K_t)
        if tol is None:
            a = rows.reciprocal_().mul_(1 / n)
            b = _product(a, K).reciprocal_().mul_(1 / m)
            continue
        moving = moving & ((_error(a * rows) > tol) | (step == 0))
        if not moving.any():
            break
        a = torch.where(moving, (1 / n) / rows, a)
        b = torch.where(moving, (1 / m) / _product(a, K), b)
        taken = taken + moving
    return a, b, moving, taken if tol is not None else taken + steps


def _product(x: Tensor, K: Tensor) -> Tensor:
    """x K, [b, 1, n] by [b, n, m]; the batched product has too high a price for tiny ones."""
    if K.shape[-2] * K.shape[-1] <= 400:
        return (x.transpose(-2, -1) * K).sum(-2, keepdim=True)
    return torch.bmm(x, K)
