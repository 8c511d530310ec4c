"""The Sinkhorn kernels against the float64 reference: interpreted here, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alignmixup.ops import _reference
from alignmixup.ops.backend import choose_backend, refuse_sinkhorn
from alignmixup.ops.sinkhorn import sinkhorn
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

from alignmixup.ops.triton import (  # noqa: E402
    align as _triton,
    sinkhorn_large as _triton_large,
    sinkhorn_small as _triton_small,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sizes at the edges of what one program pads to, and beyond where the blocks of rows begin.
SMALL = [(1, 1), (3, 5), (16, 16), (20, 40), (49, 49), (64, 64)]
LARGE = [(65, 65), (70, 130)]


def random_cost(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (scale * torch.rand(*shape, generator=rng)).to(DEVICE)


def check_against_reference(cost: Tensor, num_iters: int, last: str = "columns") -> None:
    """No further from float64 than twice what the float32 reference is, or a few roundings."""
    plan, used = _triton.solve(cost, 0.1, num_iters, None, last)
    exact, _ = _reference.solve(cost.double(), 0.1, num_iters, None, last)
    plain, _ = _reference.solve(cost, 0.1, num_iters, None, last)
    size = max(cost.shape[-2:])
    error = (plan - exact).abs().max().item() * size
    assert error <= 2 * (plain - exact).abs().max().item() * size + 3e-6
    assert used.tolist() == [num_iters] * len(cost)
    assert plan.shape == cost.shape


@pytest.mark.parametrize(("n", "m"), SMALL)
@pytest.mark.parametrize(
    "num_iters", [0, 11, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 100))]
)
def test_small_plans(n: int, m: int, num_iters: int) -> None:
    check_against_reference(random_cost(2, n, m, scale=20.0), num_iters)


@pytest.mark.parametrize(("n", "m"), LARGE)
@pytest.mark.parametrize("num_iters", [0, 1, 2, 30])
def test_large_plans(n: int, m: int, num_iters: int) -> None:
    check_against_reference(random_cost(2, n, m, scale=20.0), num_iters)


@pytest.mark.parametrize(
    ("num_iters", "scale"), [(0, 20.0), (1, 20.0), (2, 20.0), (30, 30.0), (6, 1e6)]
)
def test_plans_by_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch, num_iters: int, scale: float
) -> None:
    """The kernel where no size class runs, with four of nine rows at a time."""
    monkeypatch.setattr("alignmixup.ops.size_classes.SIZE_CLASSES", ())  # all off
    monkeypatch.setattr(_triton_large, "BLOCK", 64)
    monkeypatch.setattr(_triton_small, "MAX_POSITIONS", 4)
    check_against_reference(random_cost(2, 9, 12, scale=scale), num_iters)


@pytest.mark.parametrize("n", [16, 70])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1e3, 1e6])
def test_costs_of_any_size(n: int, scale: float) -> None:
    check_against_reference(random_cost(1, n, n, scale=scale), 25)


@pytest.mark.parametrize(("n", "m"), [(12, 7), (66, 80)])
def test_rows_last(n: int, m: int) -> None:
    check_against_reference(random_cost(2, n, m, scale=10.0), 10, "rows")


@pytest.mark.parametrize("n", [8, 65])
@pytest.mark.parametrize("tol", [0.3, 1e-3])
def test_tol_stops_each_sample_where_the_reference_stops_it(n: int, tol: float) -> None:
    cost = random_cost(4, n, n) * torch.tensor([0.0, 0.5, 3.0, 30.0], device=DEVICE)[:, None, None]
    plan, used = _triton.solve(cost, 0.1, 60, tol, "columns")
    expected, expected_used = _reference.solve(cost.double(), 0.1, 60, tol, "columns")
    assert used.unique().numel() > 1
    assert torch.equal(used, expected_used)
    torch.testing.assert_close(plan.double() * n, expected * n, atol=1e-5, rtol=0)


def test_strides_of_the_cost_do_not_matter() -> None:
    cost = random_cost(5, 6, 2, scale=5.0)
    permuted = cost.permute(2, 1, 0)
    plan, _ = _triton.solve(permuted, 0.1, 5, None, "columns")
    expected, _ = _triton.solve(permuted.contiguous(), 0.1, 5, None, "columns")
    # Not to the bit: on a GPU other strides may give the threads other entries, to add in another
    # order.
    torch.testing.assert_close(plan, expected, rtol=1e-5, atol=0)


# ---- which path ran, and which cannot ------------------------------------------------------------


def test_the_size_decides_which_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignmixup.ops.size_classes.SIZE_CLASSES", ())  # all off
    ran = []
    for module in (_triton_small, _triton_large):
        solve = module.solve
        monkeypatch.setattr(
            module, "solve", lambda *a, s=solve, m=module: (ran.append(m.__name__), s(*a))[1]
        )
    for n, m in ((64, 3), (3, 65)):
        transport = sinkhorn(random_cost(1, n, m), num_iters=1, backend="triton")
        assert transport.backend == "triton"
    assert ran == [_triton_small.__name__, _triton_large.__name__]


def test_auto_takes_the_kernels_on_a_gpu_and_not_elsewhere() -> None:
    transport = sinkhorn(random_cost(2, 4, 4), num_iters=2)
    assert transport.backend == ("triton" if DEVICE == "cuda" else "absorbed")
    gpu = torch.device("cuda")

    def choose(dtype: torch.dtype, size: int) -> str:
        return choose_backend("auto", gpu, "absorbed", refuse_sinkhorn, gpu, dtype, size)

    assert choose(torch.float32, 64) == "triton"
    # What the kernels refuse falls back to the reference, which does not synchronize.
    assert choose(torch.float64, 64) == "reference"
    assert choose(torch.float32, 2000) == "reference"


def test_asked_for_by_name_it_runs_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot run here: it computes in float32, got .*float64"):
        sinkhorn(random_cost(4, 4).double(), backend="triton")
    with pytest.raises(ValueError, match="at most 1024 positions, got 1025"):
        sinkhorn(random_cost(2, 1025), backend="triton")
    monkeypatch.setattr("alignmixup.ops.triton.common.INTERPRETED", False)
    with pytest.raises(ValueError, match="it needs a CUDA device, or TRITON_INTERPRET=1"):
        sinkhorn(torch.rand(4, 4), backend="triton")


def test_a_batch_may_be_empty_or_have_several_dimensions() -> None:
    assert sinkhorn(random_cost(0, 4, 5), backend="triton").plan.shape == (0, 4, 5)
    cost = random_cost(2, 2, 3, 4)
    transport = sinkhorn(cost, num_iters=3, backend="triton")
    assert transport.num_iters.tolist() == [[3, 3], [3, 3]]
    assert torch.equal(
        transport.plan[1, 0], sinkhorn(cost[1, 0], num_iters=3, backend="triton").plan
    )


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 49, 64, 65, 100, 196, 400, 1024])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_full_batches(n: int, scale: float) -> None:
    check_against_reference(random_cost(128 if n <= 196 else 8, n, n, scale=scale), 100)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 64, 196])
def test_the_same_bits_each_time(n: int) -> None:
    cost = random_cost(64, n, n, scale=30.0)
    first, _ = _triton.solve(cost, 0.1, 100, None, "columns")
    for _ in range(20):
        again, _ = _triton.solve(cost, 0.1, 100, None, "columns")
        assert torch.equal(first, again)  # a difference would be a race
