"""Sinkhorn iterations on an absorbed kernel: the log-domain iterations without exp and log.

    K = exp(S + u + v),   a = (1/n) / (K b),   b = (1/m) / (K' a),   P = diag(a) K diag(b)

Symbols: S, u, v as in the reference; a, b the change of the scalings since u, v were absorbed.

**Safety.** log-sum-exp is non-expansive in the maximum norm, so the change of the log scalings in
one iteration, d = max |log(n K 1)| right after an absorption, never grows. If d is at most
MAX_CHANGE, the next REACH / d iterations multiply each scaling by at most e^REACH. Entries of K
below e^floor are set to zero: they could grow to e^(floor + 2 REACH) at most, far below the
precision of the marginals. If d is larger, the iteration is done in the log domain. So the results
are those of the log-domain iterations, up to rounding, for every cost.

**After one iteration d is at most log max(n, m).** Its second half divides each column by m times
its sum s_j, so row i sums to the sum over j of P_ij / (m s_j). No s_j exceeds the total mass, one,
so this is at least (1/n) / m; and no P_ij exceeds s_j, so it is at most one. Hence only the first
iteration is done in the log domain, for fewer than some thousands of positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alignmixup.ops import _reference

MAX_CHANGE = 9.0
REACH = 18.0
# Above this floor every product K_ij a_i is a normal number: subnormals, and the exponentials that
# produce them, are slow on a CPU.
FLOORS = {torch.float32: -60.0, torch.float64: -600.0}
# Elements of K per chunk on a CPU: K, its transpose and S fit the cache of one core.
CHUNK = 2**17


def solve(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    """Return the plans [..., n, m] and the number of iterations of each [...].

    It reads the row sums after each absorption, which would synchronize with a GPU.
    """
    if last == "rows":  # the transposed problem
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
    """Solve [b, n, m] with exact columns: log-domain steps until linear ones are safe."""
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
            # exp(S + u + v) would round large u and v, and lose the marginals.
            return K.mul_(a.transpose(-2, -1)).mul_(b), used.view(-1)
        u, v = u + a.transpose(-2, -1).log(), v + b.log()


def _log_step(S: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    n, m = S.shape[-2:]
    u = -math.log(n) - _logsumexp(S + v, -1)
    return u, -math.log(m) - _logsumexp(S + u, -2)


def _logsumexp(x: Tensor, dim: int) -> Tensor:
    """Return log sum exp and overwrite ``x``; terms below e^floor of the largest are clamped."""
    top = x.amax(dim, keepdim=True)
    return x.sub_(top).clamp_(min=FLOORS[x.dtype]).exp_().sum(dim, keepdim=True).log_().add_(top)


def _error(rows: Tensor) -> Tensor:
    """Return the distance [b, 1, 1] of row sums, as row or column vectors, from uniform."""
    return (rows - 1 / max(rows.shape[-2:])).abs().sum((-2, -1), keepdim=True)


def _safe_steps(rows: Tensor) -> int:
    """Return the number of safe linear iterations after an absorption with these row sums."""
    low, high = (x.item() * rows.shape[-2] for x in torch.aminmax(rows))
    if not (low >= math.exp(-MAX_CHANGE) and high <= math.exp(MAX_CHANGE)):  # NaN fails too
        return 0
    return int(REACH / max(-math.log(low), math.log(high), 1e-3))


def _linear_steps(
    K: Tensor, steps: int, tol: float | None, moving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run ``steps`` iterations; return a [b, 1, n], b [b, 1, m], who still moves, steps."""
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
    """Return x K, [b, 1, n] by [b, n, m]; for tiny matrices bmm is slower than a sum."""
    if K.shape[-2] * K.shape[-1] <= 400:
        return (x.transpose(-2, -1) * K).sum(-2, keepdim=True)
    return torch.bmm(x, K)
