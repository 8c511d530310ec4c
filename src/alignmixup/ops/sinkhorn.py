"""Entropic optimal transport between two sets of positions with uniform weights.

    P* = argmin <P, C> - eps H(P),  P 1 = 1/n,  P' 1 = 1/m          (paper, eq. for the assignment)

Symbols: n, m positions in each set; C cost; P plan, rows = positions of the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignmixup.ops import _absorbed, _reference
from alignmixup.ops._precision import full_float32
from alignmixup.ops.backend import choose_backend, refuse_sinkhorn

Side = Literal["rows", "columns"]
Backend = Literal["auto", "reference", "absorbed", "triton"]
Solver = Callable[[Tensor, float, int, float | None, str], tuple[Tensor, Tensor]]


def _solve_by_triton(
    cost: Tensor, eps: float, num_iters: int, tol: float | None, last: str
) -> tuple[Tensor, Tensor]:
    from alignmixup.ops.triton import align as _triton

    return _triton.solve(cost, eps, num_iters, tol, last)


SOLVERS: dict[str, Solver] = {
    "reference": _reference.solve,
    "absorbed": _absorbed.solve,
    "triton": _solve_by_triton,
}


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """A batch of transport plans.

    Args:
        plan: The plans ``[..., n, m]``; rows are positions of the anchor. Each plan sums to one.
        backend: Name of the solver that ran.
        num_iters: Number of iterations of each problem.

    Example:
        ```python
        transport = am.sinkhorn(torch.rand(5, 16, 16), eps=0.1)
        print(transport.backend, transport.marginal_error.max(), transport.entropy.mean())
        ```
    """

    plan: Float[Tensor, "*batch n m"]
    backend: str
    num_iters: Int[Tensor, "*batch"]

    @property
    def marginal_error(self) -> Float[Tensor, "*batch"]:
        """Sum of all |row sum - 1/n| and |column sum - 1/m| of each plan."""
        n, m = self.plan.shape[-2:]
        rows = (self.plan.sum(-1) - 1 / n).abs().sum(-1)
        columns = (self.plan.sum(-2) - 1 / m).abs().sum(-1)
        return rows + columns

    @property
    def entropy(self) -> Float[Tensor, "*batch"]:
        """-sum P log P of each plan: log(n m) for the uniform plan, log n for a permutation."""
        entropy: Tensor = torch.special.entr(self.plan).sum((-2, -1))
        return entropy


def sinkhorn(
    cost: Float[Tensor, "*batch n m"],
    *,
    eps: float = 0.1,
    num_iters: int = 100,
    tol: float | None = None,
    last: Side = "columns",
    backend: Backend = "auto",
) -> Transport:
    """Solve a batch of entropic transport problems with uniform marginals.

    No gradient flows. Half-precision costs are converted to float32, and autocast does not apply.
    ``torch.compile`` may break the graph here; ``align_mix`` is one operator and does not.

    Args:
        cost: Costs ``[..., n, m]``; rows are positions of the anchor.
        eps: Strength of the entropic regularization.
        num_iters: Number of iterations; 0 normalizes the side ``last`` once (cross-attention).
        tol: Stop a problem when its other marginal is off by at most ``tol`` in total; None runs
            all iterations.
        last: The marginal that is updated last in each iteration and is exact in the plan.
        backend: ``"auto"`` chooses by device; ``"reference"``, ``"absorbed"`` or ``"triton"`` runs
            or fails with an error.

    Returns:
        The plans, the backend that ran and the iterations of each problem.

    Raises:
        ValueError: If a setting is out of range, the cost is not a float tensor, or the backend
            cannot run on this device.

    Example:
        ```python
        cost = am.pairwise_cost(torch.randn(8, 64, 16), torch.randn(8, 64, 16))
        plan = am.sinkhorn(cost, eps=0.1, num_iters=100).plan
        assert torch.allclose(plan.sum(-2), torch.full((8, 16), 1 / 16))  # columns are exact
        ```
    """
    check_settings(eps, num_iters, tol, last)
    if cost.ndim < 2 or not cost.is_floating_point():
        raise ValueError(
            f"cost must be a float tensor [..., n, m], got {cost.dtype} {list(cost.shape)}"
        )
    if 0 in cost.shape[-2:]:
        raise ValueError(f"cost needs at least one row and one column, got {list(cost.shape)}")
    # Autocast would run the products in half precision, where the scalings overflow.
    with torch.no_grad(), full_float32(cost.device):
        wide = cost.detach().to(torch.promote_types(cost.dtype, torch.float32))
        name = solver_name(backend, wide, max(wide.shape[-2:]))
        plan, used = SOLVERS[name](wide, eps, num_iters, tol, last)
    return Transport(plan=plan, backend=name, num_iters=used)


def solver_name(backend: str, like: Tensor, size: int) -> str:
    """Return the solver that will run; on a GPU "absorbed" would synchronize."""
    device = like.device
    return choose_backend(backend, device, "absorbed", refuse_sinkhorn, device, like.dtype, size)


def check_settings(eps: float, num_iters: int, tol: float | None, last: str) -> None:
    """Raise a ``ValueError`` for a setting out of range."""
    # Tuples: torch.compile of torch 2.6 cannot trace a union of types.
    if not isinstance(eps, (float, int)) or not eps > 0:
        raise ValueError(f"eps must be a positive number, got {eps!r}; the paper uses 0.1")
    if not isinstance(num_iters, int) or num_iters < 0:
        raise ValueError(
            f"num_iters must be an integer >= 0 (0: normalize once), got {num_iters!r}"
        )
    if tol is not None and (not isinstance(tol, (float, int)) or not tol > 0):
        raise ValueError(f"tol must be positive, or None for all iterations, got {tol!r}")
    if last not in ("rows", "columns"):
        raise ValueError(f"last must be 'rows' or 'columns', got {last!r}")
