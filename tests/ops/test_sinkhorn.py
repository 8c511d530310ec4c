"""Entropic transport: laws of the plan, POT as the oracle, and float32 where costs are hard."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import ot as pot
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from alignmixup.datasets import shapes
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import Transport, sinkhorn

SIDES = ["rows", "columns"]
both_sides = pytest.mark.parametrize("last", SIDES)
sizes = st.integers(1, 8)


def random_cost(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.rand(*shape, generator=rng, dtype=torch.float64)


# The solvers that run on any machine. All tests run with each of them; kernels have tests of their
# own, against the reference.
BACKENDS = ["reference", "absorbed"]
chosen = {"backend": "auto"}


@pytest.fixture(autouse=True, scope="module", params=BACKENDS)
def _backend(request: pytest.FixtureRequest) -> None:
    chosen["backend"] = request.param


def solve(cost: Tensor, **settings) -> Transport:
    return sinkhorn(cost, **{**chosen, **settings})


def assert_close(one: Tensor, other: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


# ---- laws ----------------------------------------------------------------------------------------

problems = given(
    n=sizes,
    m=sizes,
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    scale=st.sampled_from([0.01, 0.3, 3.0, 300.0, 3e5]),
    num_iters=st.sampled_from([0, 1, 7]),
    last=st.sampled_from(SIDES),
    seed=st.integers(0, 10_000),
)


@problems
def test_plans_are_non_negative_and_the_last_side_is_exact(
    n, m, batch, scale, num_iters, last, seed
) -> None:
    cost = random_cost(*batch, n, m, seed=seed, scale=scale)
    plan = solve(cost, num_iters=num_iters, last=last).plan
    assert plan.shape == cost.shape
    assert plan.dtype == torch.float64
    assert (plan >= 0).all()
    sums, share = (plan.sum(-1), 1 / n) if last == "rows" else (plan.sum(-2), 1 / m)
    assert_close(sums, torch.full_like(sums, share), atol=1e-9)


@given(n=sizes, m=sizes, last=st.sampled_from(SIDES), seed=st.integers(0, 10_000))
def test_both_marginals_are_uniform_in_the_end(n: int, m: int, last: str, seed: int) -> None:
    # Costs within [0, 1]: at eps = 0.5 an iteration shrinks the error by tanh(1)^2 = 0.58 at least.
    transport = solve(random_cost(2, n, m, seed=seed), eps=0.5, num_iters=100, last=last)
    assert_close(transport.plan.sum(-1), torch.full((2, n), 1 / n, dtype=torch.float64), 1e-6)
    assert_close(transport.plan.sum(-2), torch.full((2, m), 1 / m, dtype=torch.float64), 1e-6)
    assert (transport.marginal_error < 1e-6).all()


@problems
def test_permuted_positions_permute_the_plan(n, m, batch, scale, num_iters, last, seed) -> None:
    cost = random_cost(*batch, n, m, seed=seed, scale=scale)
    rng = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(n, generator=rng), torch.randperm(m, generator=rng)
    shuffled = solve(cost[..., rows, :][..., columns], num_iters=num_iters, last=last).plan
    plan = solve(cost, num_iters=num_iters, last=last).plan
    assert_close(shuffled, plan[..., rows, :][..., columns], atol=1e-9)


@problems
def test_a_transposed_cost_gives_the_transposed_plan(
    n, m, batch, scale, num_iters, last, seed
) -> None:
    cost = random_cost(*batch, n, m, seed=seed, scale=scale)
    other = "columns" if last == "rows" else "rows"
    plan = solve(cost, num_iters=num_iters, last=last).plan
    assert_close(solve(cost.mT, num_iters=num_iters, last=other).plan.mT, plan)


@problems
def test_a_constant_changes_nothing(n, m, batch, scale, num_iters, last, seed) -> None:
    """Nor does one for each row where rows are scaled first, or for each column where columns are.

    Without iterations there is only the side that is normalized.
    """
    cost = random_cost(*batch, n, m, seed=seed, scale=scale)
    plan = solve(cost, num_iters=num_iters, last=last).plan
    absorbs_rows = (last == "rows") == (num_iters == 0)
    lines = random_cost(*batch, *((n, 1) if absorbs_rows else (1, m)), seed=seed + 1, scale=scale)
    # The sums are rounded in float64, and an error of eps in a cost is a factor e in the plan.
    atol = 1e-12 + 50 * scale * 2.3e-16 / 0.1
    for shift in (torch.tensor(5 * scale), lines):
        assert_close(solve(cost + shift, num_iters=num_iters, last=last).plan, plan, atol)


@pytest.mark.slow
@given(n=sizes, m=sizes, last=st.sampled_from(SIDES), seed=st.integers(0, 10_000))
def test_constants_of_rows_and_columns_change_nothing_in_the_end(n, m, last, seed) -> None:
    cost = random_cost(n, m, seed=seed)
    shifted = cost + random_cost(n, 1, seed=seed + 1) + random_cost(1, m, seed=seed + 2)
    plans = [solve(c, eps=0.3, num_iters=1000, last=last).plan for c in (cost, shifted)]
    assert_close(plans[0], plans[1], atol=1e-9)


@given(n=sizes, m=sizes, scale=st.sampled_from([1e-3, 1.0, 1e3]), seed=st.integers(0, 10_000))
def test_only_the_ratio_of_cost_and_eps_counts(n: int, m: int, scale: float, seed: int) -> None:
    cost = random_cost(2, n, m, seed=seed)
    plan = solve(cost, eps=0.1, num_iters=20).plan
    assert_close(solve(scale * cost, eps=scale * 0.1, num_iters=20).plan, plan, atol=1e-11)


def test_the_plan_minimizes_what_it_should() -> None:
    """<P, C> - eps H(P) is least at the plan among plans of the same marginals."""
    cost, eps = random_cost(6, 6), 0.2
    plan = solve(cost, eps=eps, num_iters=2000).plan

    def objective(P: Tensor) -> float:
        return float((P * cost).sum() - eps * torch.special.entr(P).sum())

    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        step = torch.randn(6, 6, generator=rng, dtype=torch.float64)
        step = step - step.mean(0) - step.mean(1, keepdim=True) + step.mean()  # keeps the sums
        step *= 0.5 * plan.min() / step.abs().max()
        assert objective(plan + step) > objective(plan)


# ---- agreements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_iters", [1, 2, 10, 100])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (7, 4), (16, 16), (49, 49)])
def test_pot_after_the_same_number_of_iterations(shape: tuple[int, int], num_iters: int) -> None:
    """POT scales columns first and rows last."""
    n, m = shape
    cost = random_cost(n, m, seed=n + m, scale=5.0)
    theirs = pot.sinkhorn(
        np.full(n, 1 / n),
        np.full(m, 1 / m),
        cost.numpy(),
        reg=0.1,
        method="sinkhorn_log",
        numItermax=num_iters,
        stopThr=0,
        warn=False,
    )
    ours = solve(cost, num_iters=num_iters, last="rows").plan
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-10, rtol=0)


@both_sides
def test_pot_batched_and_converged(last: str) -> None:
    cost = random_cost(5, 9, 6)
    theirs = pot.solve_batch(cost, reg=0.1, max_iter=5000, tol=1e-14, method="log_sinkhorn").plan
    assert_close(solve(cost, num_iters=5000, last=last).plan, theirs, atol=1e-6)


@both_sides
def test_a_small_eps_gives_the_exact_assignment(last: str) -> None:
    """The least cost, up to eps log n: two assignments may cost the same within that."""
    cost = random_cost(3, 8, 8, scale=100.0)
    plans = solve(cost, eps=0.05, num_iters=5000, last=last).plan
    for plan, one in zip(plans.numpy(), cost.numpy(), strict=True):
        exact = pot.emd(np.full(8, 1 / 8), np.full(8, 1 / 8), one)
        least, mean = (exact * one).sum(), one.mean()
        assert (plan * one).sum() == pytest.approx(least, abs=0.05 * math.log(8))
        assert mean > least + 10 * 0.05 * math.log(8)


@pytest.mark.parametrize("num_iters", [0, 3])
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (0,)])
def test_any_leading_shape_is_a_loop(batch: tuple[int, ...], num_iters: int) -> None:
    cost = random_cost(*batch, 4, 6, scale=3.0)
    transport = solve(cost, num_iters=num_iters)
    assert transport.num_iters.shape == batch
    alone = [solve(one, num_iters=num_iters).plan for one in cost.reshape(-1, 4, 6)]
    expected = torch.stack(alone).view(*batch, 4, 6) if alone else cost
    assert_close(transport.plan, expected)


@both_sides
def test_without_iterations_one_side_is_normalized_once(last: str) -> None:
    cost = random_cost(2, 5, 7)
    transport = solve(cost, eps=0.3, num_iters=0, last=last)
    expected = (-cost / 0.3).softmax(-1) / 5 if last == "rows" else (-cost / 0.3).softmax(-2) / 7
    assert_close(transport.plan, expected)
    assert (transport.num_iters == 0).all()


@both_sides
def test_without_iterations_large_costs_keep_their_digits(last: str) -> None:
    """Multiples of 1/64, which float32 has near 10,000 too; divided by eps it would round them."""
    cost = (64 * random_cost(5, 7)).round() / 64
    settings = {"eps": 0.3, "num_iters": 0, "last": last}
    far, near = (solve(c, **settings).plan for c in ((cost + 1e4).float(), cost))
    torch.testing.assert_close(far.double(), near, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_raised_to_float32(dtype: torch.dtype) -> None:
    cost = random_cost(3, 5, 5, scale=20.0).to(dtype)
    plan = solve(cost).plan
    assert plan.dtype == torch.float32
    assert torch.equal(plan, solve(cost.float()).plan)


def test_autocast_changes_nothing() -> None:
    cost = random_cost(3, 16, 16, scale=100.0).float()
    with torch.autocast("cpu", torch.bfloat16):
        plan = solve(cost).plan
    assert torch.equal(plan, solve(cost).plan)


# ---- float32 on hard costs: within 1e-3 of float64, in units of 1 / n ----------------------------


def points(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Costs of range 0 to 1, for scaling up; the comment says what is hard about them.
HARD = {
    "random": lambda n: points(6, n, n, seed=0),
    "clustered": lambda n: (0.03 * points(6, n, 1, seed=1) - points(6, 1, n, seed=2)).square(),
    "line": lambda n: (points(6, n, 1, seed=3) - points(6, 1, n, seed=4)).square(),
    "product": lambda n: points(6, n, 1, seed=5) * points(6, 1, n, seed=6),  # all want one column
    "popular": lambda n: points(6, 1, n, seed=7) + 1e-3 * points(6, n, n, seed=8),
    "binary": lambda n: (points(6, n, n, seed=9) < 0.5).double(),  # ties everywhere
}


@both_sides
@pytest.mark.parametrize("n", [1, 16, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 49))])
@pytest.mark.parametrize("name", HARD)
def test_float32_is_near_float64_on_hard_costs(name: str, n: int, last: str) -> None:
    cost = (1000 * HARD[name](n)).float()
    narrow, wide = (solve(c, last=last).plan for c in (cost, cost.double()))
    assert narrow.dtype == torch.float32
    assert_close(narrow.double() * n, wide * n, atol=1e-3)


@both_sides
@pytest.mark.parametrize("num_iters", [0, 1, 100])
@pytest.mark.parametrize("scale", [1e4, pytest.param(1e5, marks=pytest.mark.slow), 1e6])
@pytest.mark.parametrize("name", HARD)
def test_no_nan_up_to_costs_of_a_million(name, scale, num_iters, last) -> None:
    plan = solve((scale * HARD[name](16)).float(), num_iters=num_iters, last=last).plan
    assert plan.isfinite().all()
    assert (plan >= 0).all()
    sums = plan.sum(-1 if last == "rows" else -2)
    # Scalings of 1e7 have a step of 1 in float32, so here a plan is good to a tenth at best.
    torch.testing.assert_close(sums, torch.full_like(sums, 1 / 16), atol=0, rtol=0.3)


class Block(nn.Module):
    """A pre-activation residual block."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn1(x).relu()
        return self.conv2(self.bn2(self.conv1(h)).relu()) + self.skip(h)


def network() -> nn.Sequential:
    """Images of 32 x 32 to raw features of 128 x 4 x 4."""
    stages = [nn.Conv2d(3, 16, 3, padding=1), *[Block(2**k, 2 ** (k + 1), 2) for k in (4, 5, 6)]]
    net, rng = nn.Sequential(*stages), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5, generator=rng)
    return net


@cache
def trained_features() -> Tensor:
    """Features of held-out shapes after a short training that has begun to tell them apart.

    Trained in float64, which ends in the same features on every machine.
    """
    train, held_out = shapes("train", 320), shapes("test", 8)
    x, y = train.images.double() / 255, train.labels
    net = network().double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(128, 10).double()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.02, momentum=0.9)
    losses = []
    for step in range(40):
        here = slice(16 * (step % 20), 16 * (step % 20 + 1))
        loss = nn.functional.cross_entropy(head(net(x[here]).mean((2, 3))), y[here])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < sum(losses[:20]), "nothing was learned: not a trained network"
    with torch.no_grad():
        return net(held_out.images.double() / 255).flatten(2).float()


@pytest.mark.slow
@both_sides
def test_float32_is_near_float64_on_the_features_of_a_trained_network(last: str) -> None:
    features = trained_features()
    cost = pairwise_cost(features, features.roll(1, 0))
    assert cost.max() > 10  # 100 eps: far from the easy costs around eps
    narrow, wide = (solve(c, last=last).plan for c in (cost, cost.double()))
    assert_close(narrow.double() * 16, wide * 16, atol=1e-3)


@both_sides
@pytest.mark.parametrize("scale", [1, 3])  # features grow in training, and costs with their square
def test_float32_is_near_float64_on_the_features_of_a_network(scale: float, last: str) -> None:
    net, rng = network(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        features = scale * net(torch.rand(8, 3, 32, 32, generator=rng)).flatten(2)
    cost = pairwise_cost(features, features.roll(1, 0))
    assert cost.max() > 200 * scale**2  # exp(-cost / eps) is zero in float32: no easy case
    narrow, wide = (solve(c, last=last).plan for c in (cost, cost.double()))
    assert_close(narrow.double() * 16, wide * 16, atol=1e-3)


# ---- stopping early ------------------------------------------------------------------------------


def other_error(plan: Tensor, last: str) -> Tensor:
    """What the marginal that was not enforced last is off by, in total."""
    sums = plan.sum(-2 if last == "rows" else -1)
    return (sums - 1 / sums.shape[-1]).abs().sum(-1)


@both_sides
@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-6])
def test_tol_stops_each_sample_at_the_first_iteration_that_is_good_enough(
    tol: float, last: str
) -> None:
    cost = random_cost(6, 5, 8) * torch.tensor([0.0, 0.1, 0.3, 1.0, 3.0, 300.0])[:, None, None]
    transport = solve(cost, num_iters=400, tol=tol, last=last)
    assert transport.num_iters.unique().numel() > 3
    assert transport.num_iters[0] == 1  # equal costs need no second look
    for one, plan, used in zip(cost, transport.plan, transport.num_iters.tolist(), strict=True):
        assert_close(plan, solve(one, num_iters=used, last=last).plan)
        if used < 400:
            assert other_error(plan, last) <= tol
        if used > 1:
            assert other_error(solve(one, num_iters=used - 1, last=last).plan, last) > tol


@both_sides
def test_tol_does_not_see_the_neighbors(last: str) -> None:
    cost = random_cost(6, 5, 8) * torch.tensor([0.1, 300.0, 0.3, 1.0, 3.0, 0.0])[:, None, None]
    together = solve(cost, num_iters=200, tol=1e-4, last=last)
    for i in range(6):
        alone = solve(cost[i], num_iters=200, tol=1e-4, last=last)
        assert alone.num_iters == together.num_iters[i]
        assert_close(alone.plan, together.plan[i])


def test_a_fixed_number_of_iterations_is_reported() -> None:
    assert solve(random_cost(3, 4, 4), num_iters=17).num_iters.tolist() == [17, 17, 17]
    assert solve(random_cost(4, 4), num_iters=9, tol=1e-12).num_iters == 9
    assert solve(torch.zeros(1, 1), tol=0.1).num_iters == 1  # also where there is no choice


class NoHostSync(TorchDispatchMode):
    """Fails where a number is carried from the device to the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tol", [None, 1e-3])
def test_the_iterations_do_not_wait_for_the_device(tol: float | None) -> None:
    """Those that a GPU may run: on a CPU there is nothing to wait for."""
    with NoHostSync():
        solve(random_cost(3, 4, 4), num_iters=5, tol=tol, backend="reference")
        with pytest.raises(AssertionError, match="waits for the device"):
            bool(torch.ones(()) > 0)


# ---- the record ----------------------------------------------------------------------------------


def test_marginal_error_and_entropy_are_what_they_say() -> None:
    plan = random_cost(3, 4, 5)
    record = Transport(plan=plan, backend="reference", num_iters=torch.zeros(3, dtype=torch.int32))
    for P, error, entropy in zip(plan.numpy(), record.marginal_error, record.entropy, strict=True):
        expected = abs(P.sum(1) - 1 / 4).sum() + abs(P.sum(0) - 1 / 5).sum()
        assert float(error) == pytest.approx(expected)
        assert float(entropy) == pytest.approx(-(P * np.log(P)).sum())


def test_entropy_of_the_extremes() -> None:
    spread = solve(torch.zeros(4, 6), num_iters=3)
    matched = solve(1e4 * (1 - torch.eye(5)), num_iters=3)
    assert float(spread.entropy) == pytest.approx(math.log(24))
    assert float(matched.entropy) == pytest.approx(math.log(5))


def test_no_gradient_flows_and_the_cost_is_left_alone() -> None:
    cost = random_cost(2, 3, 3).requires_grad_()
    kept = cost.detach().clone()
    assert not solve(cost).plan.requires_grad
    assert torch.equal(cost, kept)


def test_the_backend_that_ran_is_named() -> None:
    assert solve(random_cost(3, 3)).backend == chosen["backend"]
    auto = sinkhorn(random_cost(3, 3))
    assert auto.backend in BACKENDS
    assert torch.equal(auto.plan, sinkhorn(random_cost(3, 3), backend=auto.backend).plan)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("cost", "settings", "message"),
    [
        (
            torch.ones(3),
            {},
            r"cost must be a float tensor \[\.\.\., n, m\], got torch.float32 \[3\]",
        ),
        (torch.ones(3, 3, dtype=torch.int64), {}, "got torch.int64"),
        (torch.ones(2, 0, 3), {}, r"at least one row and one column, got \[2, 0, 3\]"),
        (torch.ones(2, 3, 0), {}, r"at least one row and one column, got \[2, 3, 0\]"),
        (torch.ones(3, 3), {"eps": 0.0}, "eps must be a positive number, got 0.0"),
        (torch.ones(3, 3), {"eps": -0.1}, "eps must be a positive number, got -0.1"),
        (torch.ones(3, 3), {"eps": math.nan}, "eps must be a positive number, got nan"),
        (torch.ones(3, 3), {"num_iters": -1}, "num_iters must be an integer >= 0 .* got -1"),
        (torch.ones(3, 3), {"tol": 0.0}, "tol must be positive, .* got 0.0"),
        (torch.ones(3, 3), {"tol": math.nan}, "tol must be positive, .* got nan"),
        (torch.ones(3, 3), {"last": "row"}, "last must be 'rows' or 'columns', got 'row'"),
        (torch.ones(3, 3), {"backend": "nonesuch"}, "unknown backend 'nonesuch'; choose from"),
    ],
)
def test_bad_input_is_named(cost: Tensor, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(cost, **settings)
