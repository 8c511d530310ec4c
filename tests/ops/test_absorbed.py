"""The absorbed solver against the plain log-domain one: every cost, every number of iterations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.ops import _absorbed, _reference
from alignmixup.ops.sinkhorn import sinkhorn

SCALES = [0.01, 1.0, 30.0, 1e3, 1e6]  # with eps = 0.1 the largest is far beyond float32's digits


def random_cost(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.rand(*shape, generator=rng, dtype=torch.float64)


def hard_cost(seed: int = 0) -> Tensor:
    """Distances in many dimensions: some rows are far from all columns, and much has to move."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 12, 30, 400, generator=rng, dtype=torch.float64)
    return torch.cdist(a, b) ** 2


# ---- the law that makes it safe ------------------------------------------------------------------


@given(scale=st.sampled_from(SCALES), n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0))
def test_the_change_of_the_scalings_never_grows(scale, n, m, seed) -> None:
    S, u, v = _reference._start(random_cost(n, m, seed=seed % 1000, scale=scale), 0.1)
    u, v = _absorbed._log_step(S, v)
    change = math.inf
    for _ in range(20):
        rounding = 1e-9 * scale
        new_u, new_v = _absorbed._log_step(S, v)
        by_rows = (new_u - u).abs().max().item()
        by_columns = (new_v - v).abs().max().item()
        assert by_rows <= change + rounding
        assert by_columns <= by_rows + rounding
        # It is what the row sums of the absorbed kernel say.
        rows = (S + u + v).exp().sum(-1) * n
        assert rows.log().abs().max().item() == pytest.approx(by_rows, abs=1e-6 + rounding)
        u, v, change = new_u, new_v, by_columns


def test_linear_steps_end_before_the_scalings_can_overflow() -> None:
    def rows(*ratios: float) -> Tensor:
        return torch.tensor(ratios)[:, None] / len(ratios)

    assert _absorbed._safe_steps(rows(1.0, math.exp(-1.9), math.exp(1.0))) == 9
    assert _absorbed._safe_steps(rows(1.0, math.exp(0.5))) == 36
    assert _absorbed._safe_steps(rows(1.0, math.exp(-8.9))) == 2
    assert _absorbed._safe_steps(rows(1.0, 1.0)) == 18_000
    for unsafe in (math.exp(-9.1), math.exp(9.1), 0.0, math.inf, math.nan):
        assert _absorbed._safe_steps(rows(1.0, unsafe)) == 0


# ---- agreement with the reference ----------------------------------------------------------------


@given(
    n=st.integers(1, 12),
    m=st.integers(1, 12),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    scale=st.sampled_from(SCALES),
    num_iters=st.sampled_from([0, 1, 2, 9, 10, 11, 100]),
    last=st.sampled_from(["rows", "columns"]),
    seed=st.integers(0, 10_000),
)
def test_float64_gives_the_plain_iteration(n, m, batch, scale, num_iters, last, seed) -> None:
    cost = random_cost(*batch, n, m, seed=seed, scale=scale)
    plan, used = _absorbed.solve(cost, 0.1, num_iters, None, last)
    expected, expected_used = _reference.solve(cost, 0.1, num_iters, None, last)
    # exp(-1e7) has seven digits less than its argument: those are what the reference keeps.
    torch.testing.assert_close(plan, expected, atol=1e-12 + 1e-14 * scale, rtol=0)
    assert torch.equal(used, expected_used)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (16, 16), (7, 30), (49, 49)])
@pytest.mark.parametrize("num_iters", [1, 9, 10, 11, 100])
def test_float32_is_as_good_as_the_reference(n, m, num_iters, scale) -> None:
    cost = random_cost(4, n, m, scale=scale).float()
    exact, _ = _reference.solve(cost.double(), 0.1, num_iters, None, "columns")
    plain, _ = _reference.solve(cost, 0.1, num_iters, None, "columns")
    plan, _ = _absorbed.solve(cost, 0.1, num_iters, None, "columns")
    assert plan.dtype == torch.float32
    error = (plan - exact).abs().max() * m
    assert error <= 2 * (plain - exact).abs().max() * m + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thousand_iterations_on_scalings_that_travel_far(dtype: torch.dtype) -> None:
    cost = hard_cost().to(dtype)
    exact, _ = _reference.solve(cost.double(), 0.1, 1000, None, "columns")
    plan, _ = _absorbed.solve(cost, 0.1, 1000, None, "columns")
    atol = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(plan.double(), exact, atol=atol, rtol=0)


def test_the_exact_side_stays_exact_in_float32_where_the_exponents_are_large() -> None:
    cost = random_cost(8, 20, 20, scale=2000.0).float()
    plan, _ = _absorbed.solve(cost, 0.1, 300, None, "columns")
    plain, _ = _reference.solve(cost, 0.1, 300, None, "columns")
    error = (plan.double().sum(-2) * 20 - 1).abs().max()
    assert error < 1e-6
    assert error < (plain.double().sum(-2) * 20 - 1).abs().max()


# ---- tol -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["rows", "columns"])
@pytest.mark.parametrize("tol", [0.3, 1e-3, 1e-8])
def test_tol_stops_each_sample_where_the_reference_stops_it(last: str, tol: float) -> None:
    scales = torch.tensor([0.0, 0.1, 0.3, 1.0, 3.0, 30.0, 300.0], dtype=torch.float64)
    cost = random_cost(7, 9, 6) * scales[:, None, None]
    plan, used = _absorbed.solve(cost, 0.1, 200, tol, last)
    expected, expected_used = _reference.solve(cost, 0.1, 200, tol, last)
    assert used.unique().numel() > 2
    assert torch.equal(used, expected_used)
    torch.testing.assert_close(plan, expected, atol=1e-12, rtol=0)


# ---- which path ran ------------------------------------------------------------------------------


def count_steps(monkeypatch: pytest.MonkeyPatch, cost: Tensor, num_iters: int) -> tuple[int, int]:
    """How many iterations were done in the log domain and how many on an absorbed kernel."""
    done = [0, 0]
    log_step, linear_steps = _absorbed._log_step, _absorbed._linear_steps

    def counted_log_step(S: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        done[0] += 1
        return log_step(S, v)

    def counted_linear_steps(K, steps, tol, moving):  # type: ignore[no-untyped-def]
        done[1] += steps
        return linear_steps(K, steps, tol, moving)

    monkeypatch.setattr(_absorbed, "_log_step", counted_log_step)
    monkeypatch.setattr(_absorbed, "_linear_steps", counted_linear_steps)
    _absorbed.solve(cost, 0.1, num_iters, None, "columns")
    return done[0], done[1]


def test_easy_costs_leave_the_log_domain_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_steps(monkeypatch, random_cost(4, 16, 16).float(), 100) == (1, 99)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize(("n", "m"), [(12, 12), (3, 40), (40, 3)])
def test_one_iteration_brings_the_rows_within_log_size(n: int, m: int, scale: float) -> None:
    cost = random_cost(20, n, m, scale=scale)
    plan, _ = _reference.solve(cost, 0.1, 1, None, "columns")
    change = (n * plan.sum(-1)).log().abs().max()
    assert change <= math.log(max(n, m)) + 1e-6
    assert math.log(max(n, m)) < _absorbed.MAX_CHANGE


def test_hard_costs_leave_the_log_domain_at_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_steps(monkeypatch, hard_cost().float(), 300) == (1, 299)


def test_unsafe_steps_stay_in_the_log_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = hard_cost().float()
    first, _ = _reference.solve(cost, 0.1, 1, None, "columns")
    change = (cost.shape[-2] * first.sum(-1)).log().abs().max()
    monkeypatch.setattr(_absorbed, "MAX_CHANGE", 0.9 * float(change))
    log, linear = count_steps(monkeypatch, cost, 300)
    assert log > 1  # one is what it takes where steps are safe
    assert linear > 0
    assert log + linear == 300
    exact, _ = _reference.solve(cost.double(), 0.1, 300, None, "columns")
    plan, _ = _absorbed.solve(cost, 0.1, 300, None, "columns")
    torch.testing.assert_close(plan.double(), exact, atol=2e-5, rtol=0)


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = random_cost(2, 5, 6, 7, scale=20.0)
    whole = _absorbed.solve(cost, 0.1, 50, 1e-4, "columns")
    monkeypatch.setattr(_absorbed, "CHUNK", 3 * 6 * 7)
    parts = _absorbed.solve(cost, 0.1, 50, 1e-4, "columns")
    torch.testing.assert_close(parts[0], whole[0], atol=1e-13, rtol=0)
    assert torch.equal(parts[1], whole[1])


def test_the_processor_takes_the_absorbed_solver() -> None:
    transport = sinkhorn(random_cost(3, 4, 4), num_iters=7)
    assert transport.backend == "absorbed"
    assert transport.num_iters.tolist() == [7, 7, 7]


def test_a_batch_may_be_empty() -> None:
    transport = sinkhorn(torch.empty(0, 4, 5))
    assert transport.plan.shape == (0, 4, 5)
    assert transport.num_iters.shape == (0,)
