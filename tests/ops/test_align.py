"""align_mix: its laws, and its agreement with a loop that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from alignmixup.ops import _absorbed
from alignmixup.ops._precision import autocasts_to_bf16, no_autocast
from alignmixup.ops.align import _align_mix, align_mix
from alignmixup.ops.blend import blend
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.sinkhorn import sinkhorn

KEEPS = ["anchor", "partner"]
both_directions = pytest.mark.parametrize("keep", KEEPS)


def maps(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1
) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


def shares(batch_size: int, seed: int = 1) -> Tensor:
    return torch.rand(batch_size, generator=torch.Generator().manual_seed(seed))


def cycle(batch_size: int) -> Tensor:
    """The partner of each sample is the one before it: no sample is its own."""
    return torch.arange(batch_size).roll(1)


def test_shapes_are_checked_while_these_tests_run() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="partner"):
        blend(maps(3, 4, 2), maps(3, 5, 2), torch.tensor(0.5))


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 2, 3), (3, 6, 5), (1, 4, 1, 1)])
def test_a_whole_share_gives_the_kept_image_back_bit_for_bit(shape, dtype) -> None:
    features, perm = maps(*shape, dtype=dtype), cycle(shape[0])
    kept = align_mix(features, perm, torch.tensor(1.0), keep="anchor")
    assert torch.equal(kept, features)
    kept = align_mix(features, perm, torch.tensor(0.0), keep="partner")
    assert torch.equal(kept, features[perm])
    # One share a sample: only where it is whole.
    lam = torch.tensor([1.0, 0.3, 1.0])[: shape[0]]
    mixed = align_mix(features, perm, lam, keep="anchor")
    assert torch.equal(mixed[lam == 1], features[lam == 1])
    if shape[0] > 1:
        assert not torch.equal(mixed[1], features[1])


@given(
    b=st.integers(1, 4),
    c=st.integers(1, 6),
    h=st.integers(1, 4),
    w=st.integers(1, 4),
    scale=st.sampled_from([0.01, 0.3, 1.0, 10.0, 100.0]),
    num_iters=st.sampled_from([1, 5, 100]),
    keep=st.sampled_from(KEEPS),
    seed=st.integers(0, 1000),
)
def test_the_mean_over_positions_is_that_of_the_unaligned_mix(
    b: int, c: int, h: int, w: int, scale: float, num_iters: int, keep: str, seed: int
) -> None:
    """Exact in the direction whose marginal was enforced last, after any number of iterations.

    In the other one, the means differ by no more than that marginal's error allows.
    """
    features = maps(b, c, h, w, seed=seed, scale=scale)
    perm, lam = cycle(b), shares(b, seed).double()
    plain = lam[:, None] * features.mean((2, 3)) + (1 - lam[:, None]) * features[perm].mean((2, 3))
    aligned = align_mix(features, perm, lam, keep=keep, num_iters=num_iters).mean((2, 3))
    torch.testing.assert_close(aligned, plain, atol=1e-12 * scale, rtol=0)

    inexact = "rows" if keep == "anchor" else "columns"
    other = align_mix(features, perm, lam, keep=keep, num_iters=num_iters, last=inexact)
    points = features.flatten(2)
    plans = sinkhorn(pairwise_cost(points, points[perm]), num_iters=num_iters, last=inexact)
    carried, weight = (features[perm], 1 - lam) if keep == "anchor" else (features, lam)
    bound = weight * plans.marginal_error * carried.abs().amax((1, 2, 3))
    gap = (other.mean((2, 3)) - plain).abs().amax(1)
    assert (gap <= bound + 1e-12 * scale).all()


def test_the_inexact_direction_moves_the_mean() -> None:
    """The counterpart: the law above would also hold for a plan that matches nothing."""
    features, lam = maps(4, 16, 4, 4, scale=3), torch.tensor(0.5)
    exact = align_mix(features, cycle(4), lam, keep="partner").mean((2, 3))
    other = align_mix(features, cycle(4), lam, keep="partner", last="columns").mean((2, 3))
    assert (exact - other).abs().max() > 1e-3
    unaligned = torch.lerp(features[cycle(4)], features, 0.5)
    aligned = align_mix(features, cycle(4), lam, keep="partner")
    assert (aligned - unaligned).norm() > 0.1 * unaligned.norm()


@both_directions
def test_a_constant_map_aligns_to_itself(keep: str) -> None:
    """All its positions are alike, so what is carried is that one vector, wherever it goes."""
    features = maps(2, 5, 3, 3)
    features[1] = features[1, :, :1, :1]
    swap, nothing_of_the_kept = torch.tensor([1, 0]), torch.tensor(0.0 if keep == "anchor" else 1.0)
    mixed = align_mix(features, swap, nothing_of_the_kept, keep=keep)
    # Sample 0 as the anchor (its partner is constant), or sample 1 as the anchor (itself is).
    carried = mixed[0] if keep == "anchor" else mixed[1]
    torch.testing.assert_close(carried, features[1], atol=1e-12, rtol=0)


@both_directions
def test_positions_of_the_carried_image_do_not_matter(keep: str) -> None:
    features, order = maps(2, 9, 6), torch.tensor([4, 2, 8, 0, 1, 3, 7, 6, 5])
    shuffled = features.clone()
    shuffled[1] = features[1, order]
    swap, lam = torch.tensor([1, 0]), torch.tensor(0.3)
    result, twin = (align_mix(f, swap, lam, keep=keep, eps=2.0) for f in (features, shuffled))
    # Sample 0 is the anchor that keeps its positions; for the other direction look at sample 1,
    # whose partner, sample 0, keeps them.
    kept, carried = (0, 1) if keep == "anchor" else (1, 0)
    torch.testing.assert_close(twin[kept], result[kept], atol=1e-12, rtol=1e-12)
    # ... and those of the kept one are kept.
    torch.testing.assert_close(twin[carried], result[carried][order], atol=1e-12, rtol=1e-12)


def test_equal_images_give_themselves() -> None:
    """Well separated positions match one to one, so a shuffled copy is put back in order."""
    features = maps(2, 16, 5, scale=10)
    features[1] = features[0, torch.tensor([5, 3, 1, 0, 2, 4, *range(15, 5, -1)])]
    mixed = align_mix(features, torch.tensor([1, 0]), torch.tensor(0.3))
    torch.testing.assert_close(mixed, features, atol=1e-10, rtol=0)


# ---- agreements ----------------------------------------------------------------------------------


def loop_plan(cost: np.ndarray, eps: float, num_iters: int, last: str) -> np.ndarray:
    """Sinkhorn for one problem, in logarithms, an entry at a time."""
    n, m = cost.shape
    u, v = np.zeros(n), np.zeros(m)

    def update(side: str) -> None:
        if side == "rows":
            for i in range(n):
                u[i] = -np.log(n) - np.logaddexp.reduce(v - cost[i] / eps)
        else:
            for j in range(m):
                v[j] = -np.log(m) - np.logaddexp.reduce(u - cost[:, j] / eps)

    first = "columns" if last == "rows" else "rows"
    for _ in range(num_iters):
        update(first)
        update(last)
    if num_iters == 0:
        update(last)
    return np.exp(u[:, None] + v[None, :] - cost / eps)


def loop_align_mix(
    points: np.ndarray, perm: list[int], lam: list[float], keep: str, last: str, **settings
) -> np.ndarray:
    """The equations of the paper for features [b, n, c], a sample and a position at a time."""
    out = np.zeros_like(points)
    for i, partner in enumerate(perm):
        a, b = points[i], points[partner]
        r = len(a)
        cost = np.array([[((a[p] - b[q]) ** 2).sum() for q in range(r)] for p in range(r)])
        R = r * loop_plan(cost, settings["eps"], settings["num_iters"], last)
        for p in range(r):
            if keep == "anchor":
                carried = sum(R[p, q] * b[q] for q in range(r))
                out[i, p] = lam[i] * a[p] + (1 - lam[i]) * carried
            else:
                carried = sum(R[q, p] * a[q] for q in range(r))
                out[i, p] = lam[i] * carried + (1 - lam[i]) * b[p]
    return out


@pytest.mark.parametrize("last", ["rows", "columns", None])
@pytest.mark.parametrize("num_iters", [0, 1, 30])
@pytest.mark.parametrize("shape", [(3, 4, 1, 1), (4, 5, 3, 1), (3, 6, 4), (1, 3, 2, 2)])
@both_directions
def test_against_a_loop(
    keep: str, shape: tuple[int, ...], num_iters: int, last: str | None
) -> None:
    features, lam = maps(*shape), shares(shape[0])
    perm = cycle(shape[0])
    mixed = align_mix(features, perm, lam, keep=keep, eps=0.5, num_iters=num_iters, last=last)
    if last is None:  # the mean is kept by iterations, each kept position is convex without them
        exact = ["rows", "columns"] if keep == "anchor" else ["columns", "rows"]
        last = exact[num_iters > 0]
    points = features if features.ndim == 3 else features.flatten(2).mT
    expected = loop_align_mix(
        points.numpy(), perm.tolist(), lam.tolist(), keep, last, eps=0.5, num_iters=num_iters
    )
    got = mixed if features.ndim == 3 else mixed.flatten(2).mT
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "atol"),
    [
        (torch.float32, 1e-4),
        (torch.bfloat16, 2e-2),  # the result is rounded to 8 bits; the plan is not
        (torch.float16, 4e-3),
    ],
)
@both_directions
def test_narrow_features_mix_in_float32(keep: str, dtype: torch.dtype, atol: float) -> None:
    features, lam = maps(4, 8, 3, 3, dtype=dtype), shares(4)
    mixed = align_mix(features, cycle(4), lam, keep=keep)
    assert mixed.dtype == dtype
    wide = align_mix(features.double(), cycle(4), lam, keep=keep)
    torch.testing.assert_close(mixed.double(), wide, atol=atol, rtol=0)


@both_directions
def test_a_batch_is_a_loop_over_pairs(keep: str) -> None:
    features, lam, perm = maps(5, 6, 3, 2), shares(5), torch.tensor([2, 1, 4, 0, 3])
    together = align_mix(features, perm, lam, keep=keep)
    for i in range(5):
        pair = features[[i, int(perm[i])]]
        alone = align_mix(pair, torch.tensor([1, 0]), lam[[i, i]], keep=keep)[0]
        torch.testing.assert_close(together[i], alone, atol=1e-12, rtol=1e-12)


@both_directions
def test_one_share_for_all_is_that_share_for_each(keep: str) -> None:
    features = maps(4, 6, 3, 2)
    one = align_mix(features, cycle(4), torch.tensor(0.3), keep=keep)
    each = align_mix(features, cycle(4), torch.full((4,), 0.3), keep=keep)
    assert torch.equal(one, each)


def test_maps_are_tokens() -> None:
    features, lam = maps(3, 6, 2, 4), shares(3)
    by_map = align_mix(features, cycle(3), lam)
    by_token = align_mix(features.flatten(2).mT, cycle(3), lam)
    torch.testing.assert_close(by_map.flatten(2).mT, by_token, atol=1e-12, rtol=1e-12)


@both_directions
def test_without_iterations_it_is_cross_attention(keep: str) -> None:
    """Each kept position takes the softmax of -|a - a'|^2 / eps over the other's positions."""
    tokens, lam, eps = maps(3, 7, 4), shares(3).double()[:, None, None], 0.7
    partner = tokens[cycle(3)]
    logits = -torch.cdist(tokens, partner).square() / eps
    if keep == "anchor":
        expected = lam * tokens + (1 - lam) * (logits.softmax(-1) @ partner)
    else:
        expected = lam * (logits.mT.softmax(-1) @ tokens) + (1 - lam) * partner
    mixed = align_mix(tokens, cycle(3), lam.flatten(), keep=keep, eps=eps, num_iters=0)
    torch.testing.assert_close(mixed, expected, atol=1e-10, rtol=1e-10)


def test_tol_stops_near_the_fixed_iterations() -> None:
    features, lam = maps(4, 8, 3, 3), torch.tensor(0.5)
    exact = align_mix(features, cycle(4), lam, eps=1.0, num_iters=1000)
    near = align_mix(features, cycle(4), lam, eps=1.0, num_iters=1000, tol=1e-6)
    rough = align_mix(features, cycle(4), lam, eps=1.0, num_iters=1000, tol=0.3)
    torch.testing.assert_close(near, exact, atol=1e-4, rtol=0)
    assert (rough - exact).abs().max() > 10 * (near - exact).abs().max()


# ---- gradients -----------------------------------------------------------------------------------


def fixed_plan_mix(features: Tensor, plan: Tensor, perm: Tensor, lam: Tensor, keep: str) -> Tensor:
    """The mix with the plan as a given, for autograd to differentiate."""
    w, r = lam.double()[:, None, None], plan.shape[-1]
    if keep == "anchor":
        return w * features + (1 - w) * r * plan @ features[perm]
    return w * r * plan.mT @ features + (1 - w) * features[perm]


@both_directions
def test_gradients_flow_through_both_images_and_not_through_the_plan(keep: str) -> None:
    tokens, lam, perm = maps(4, 6, 5), shares(4), torch.tensor([1, 2, 0, 3])
    weights = maps(4, 6, 5, seed=9)
    leaf, twin = (tokens.clone().requires_grad_() for _ in range(2))
    (align_mix(leaf, perm, lam, keep=keep, eps=1.0) * weights).sum().backward()
    last = "columns" if keep == "anchor" else "rows"
    cost = pairwise_cost(tokens.mT, tokens[perm].mT)
    plan = sinkhorn(cost, eps=1.0, last=last).plan
    (fixed_plan_mix(twin, plan, perm, lam, keep) * weights).sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad, atol=1e-12, rtol=1e-12)
    # The plan does depend on the features, so a gradient through it would be another number.
    moved = sinkhorn(pairwise_cost(tokens.mT + 0.01 * weights.mT, tokens[perm].mT), eps=1.0).plan
    assert (moved - sinkhorn(cost, eps=1.0).plan).abs().max() > 1e-4


@pytest.mark.parametrize("shape", [(3, 2, 2, 2), (3, 4, 2), (2, 3, 1, 1)])
@both_directions
def test_gradcheck(keep: str, shape: tuple[int, ...]) -> None:
    """Where positions match one to one the plan stands still, also for numerical differences."""
    features = maps(*shape)
    positions = features if features.ndim == 3 else features.flatten(2).mT
    positions[..., 0] = 10 * torch.arange(positions.shape[1])  # far apart, each has one match
    features.requires_grad_()
    lam, perm = shares(shape[0]).double(), cycle(shape[0])
    assert torch.autograd.gradcheck(
        lambda f: align_mix(f, perm, lam, keep=keep, eps=0.05, num_iters=20), features
    )


@both_directions
def test_higher_derivatives_are_those_of_the_formula(keep: str) -> None:
    """Gradient penalties, with the plan held fixed."""
    tokens, perm, lam = maps(3, 5, 4), cycle(3), shares(3).double()
    last = "columns" if keep == "anchor" else "rows"
    plan = sinkhorn(pairwise_cost(tokens.mT, tokens[perm].mT), last=last).plan

    def derivatives(mix: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf, found = tokens.clone().requires_grad_(), []
        value = mix(leaf).pow(3).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            found.append(gradient.detach())
            value = gradient.square().sum()
        return found

    ours = derivatives(lambda leaf: align_mix(leaf, perm, lam, keep=keep))
    theirs = derivatives(lambda leaf: fixed_plan_mix(leaf, plan, perm, lam, keep))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_a_partner_of_several_gets_all_their_gradients() -> None:
    """A draw gives permutations, but the gradient adds up for any choice of partners."""
    leaf, twin = (maps(3, 4, 2).requires_grad_() for _ in range(2))
    perm, lam = torch.tensor([2, 2, 2]), torch.tensor([0.2, 0.5, 0.8])
    align_mix(leaf, perm, lam).square().sum().backward()
    with torch.no_grad():
        plan = sinkhorn(pairwise_cost(twin.mT, twin[perm].mT)).plan
    fixed_plan_mix(twin, plan, perm, lam, "anchor").square().sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad, atol=1e-10, rtol=1e-10)


# ---- memory, precision, tracing ------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept(layout: torch.memory_format, keep: str) -> None:
    features = maps(3, 6, 4, 2, dtype=torch.float32).to(memory_format=layout).requires_grad_()
    mixed = align_mix(features, cycle(3), shares(3), keep=keep)
    assert mixed.stride() == features.stride()
    assert mixed.is_contiguous(memory_format=layout)
    mixed.square().sum().backward()
    plain = features.detach().contiguous().requires_grad_()
    expected = align_mix(plain, cycle(3), shares(3), keep=keep)
    expected.square().sum().backward()
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(features.grad, plain.grad)


@both_directions
def test_autocast_and_fast_products_change_nothing(keep: str) -> None:
    """The caller's precision is for the caller's layers; ours is float32, forward and backward."""
    results = []
    before = torch.get_float32_matmul_precision()
    for precision in (before, "medium"):
        features = maps(4, 64, 4, 4, dtype=torch.float32).requires_grad_()
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "medium"):
                mixed = align_mix(features, cycle(4), shares(4), keep=keep)
            mixed.square().sum().backward()
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision(before)
        results.append((mixed, features.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("shape", [(3, 6, 4, 2), (3, 5, 4)])
def test_a_tracer_sees_the_shape_type_and_layout_there_will_be(shape: tuple[int, ...]) -> None:
    features = maps(*shape, dtype=torch.bfloat16)
    if len(shape) == 4:
        features = features.to(memory_format=torch.channels_last)
    real = align_mix(features, cycle(3), shares(3))
    with FakeTensorMode() as mode:
        fake_inputs = [mode.from_tensor(t) for t in (features, cycle(3), shares(3))]
        fake = align_mix(*fake_inputs)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("last", ["columns", "rows"])
@pytest.mark.parametrize("num_iters", [0, 2])
@pytest.mark.parametrize("backend", ["reference", "absorbed"])
def test_the_plan_has_the_layout_that_a_tracer_sees(
    monkeypatch: pytest.MonkeyPatch, last: str, num_iters: int, backend: str
) -> None:
    """Compiled code checks the strides of what an operator returns; the plan is one of these."""
    args = (False, 0.1, num_iters, 0.0, last, backend)
    for chunk in (_absorbed.CHUNK, 1):  # all pairs at once, or each by itself
        monkeypatch.setattr(_absorbed, "CHUNK", chunk)
        inputs = (torch.randn(3, 5, 4), cycle(3), shares(3))
        real = _align_mix(*inputs, *args)
        with FakeTensorMode() as mode:
            fake = _align_mix(*(mode.from_tensor(t) for t in inputs), *args)
        for ours, traced in zip(real, fake, strict=True):
            assert (ours.shape, ours.stride()) == (traced.shape, traced.stride())


class _Aligned(nn.Module):
    def forward(self, features: Tensor, perm: Tensor, lam: Tensor) -> Tensor:
        return align_mix(features, perm, lam)


@pytest.mark.unchecked_shapes
def test_an_exported_network_takes_batches_of_any_size() -> None:
    batch = torch.export.Dim("batch", min=2)
    given = (maps(4, 3, 2, 2), cycle(4), shares(4))
    sizes = ({0: batch},) * 3
    exported = torch.export.export(_Aligned(), given, dynamic_shapes=sizes, strict=False).module()
    other = (maps(5, 3, 2, 2), cycle(5), shares(5))
    assert torch.equal(exported(*other), align_mix(*other))


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": maps(3, 4)}, r"features must be float maps .* \[3, 4\]; choose a layer"),
        ({"features": maps(3, 4, 2, 2, 2)}, r"\[3, 4, 2, 2, 2\]"),
        ({"features": torch.ones(3, 4, 5, dtype=torch.int64)}, "torch.int64"),
        ({"perm": torch.arange(4)}, r"perm must have shape \[3\], got \[4\]"),
        ({"perm": torch.arange(3) + 1}, "perm must have values 0 to 2, got 1 to 3"),
        ({"perm": torch.arange(3) - 1}, "perm must have values 0 to 2, got -1 to 1"),
        ({"perm": torch.rand(3)}, "perm must have an integer dtype, got torch.float32"),
        ({"perm": torch.ones(3).bool()}, "perm must have an integer dtype, got torch.bool"),
        ({"perm": [1, 2, 0]}, r"perm must be a tensor, got \[1, 2, 0\]: use torch.tensor"),
        ({"lam": 0.5}, "lam must be a tensor, got 0.5: use torch.tensor\\(0.5\\)"),
        ({"lam": torch.ones(2)}, r"lam must have shape \[\] or \[3\], got \[2\]"),
        ({"lam": torch.ones(3, 1)}, r"lam must have shape \[\] or \[3\], got \[3, 1\]"),
        ({"keep": "both"}, "keep must be 'anchor' or 'partner', got 'both'"),
        ({"eps": 0.0}, "eps must be a positive number, got 0.0"),
        ({"eps": float("nan")}, "eps must be a positive number, got nan"),
        ({"eps": "0.1"}, "eps must be a positive number, got '0.1'"),
        ({"num_iters": 3.0}, "num_iters must be an integer .* got 3.0"),
        ({"features": torch.rand(3, 5, 0, 4)}, r"must have positions and channels, got \[3, 5, 0"),
        ({"num_iters": -1}, "num_iters must be an integer >= 0 .* got -1"),
        ({"tol": -1.0}, "tol must be positive, .* got -1.0"),
        ({"last": "both"}, "last must be 'rows' or 'columns', got 'both'"),
        ({"backend": "nonesuch"}, "unknown backend 'nonesuch'; choose from"),
    ],
)
def test_bad_input_is_named(changes: dict[str, object], message: str) -> None:
    good = {"features": maps(3, 4, 5), "perm": cycle(3), "lam": shares(3)}
    with pytest.raises(ValueError, match=message):
        align_mix(**{**good, **changes})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_a_permutation_may_be_of_any_whole_numbers(dtype: torch.dtype) -> None:
    features = maps(4, 5, 3)
    perm = torch.tensor([1, 2, 3, 1])
    expected = align_mix(features, perm, shares(4))
    assert torch.equal(align_mix(features, perm.to(dtype), shares(4)), expected)


def test_only_autocast_to_bf16_lets_a_kernel_multiply_in_bf16() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert not autocasts_to_bf16(cpu)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert autocasts_to_bf16(cpu) == (dtype == torch.bfloat16)
            assert not autocasts_to_bf16(meta)
            with no_autocast(cpu):
                assert not autocasts_to_bf16(cpu)


def test_autocast_is_not_asked_for_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot trace that question, so a compiled step would be split there."""

    def ask(name: str) -> bool:
        raise AssertionError(name)

    monkeypatch.setattr(torch.amp, "is_autocast_available", ask)
    x = torch.randn(4, 4)
    with torch.autocast("cpu"), no_autocast(x.device):
        assert (x @ x).dtype == torch.float32
    with no_autocast(torch.device("meta")):  # has no autocast
        pass


def test_autocast_of_a_device_that_a_package_adds_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda name: name == "privateuseone")
    monkeypatch.setattr(torch, "autocast", lambda name, enabled: calls.append((name, enabled)))
    no_autocast(torch.device("privateuseone"))
    assert calls == [("privateuseone", False)]
