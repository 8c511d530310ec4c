"""The fused kernels of align_mix, forward and gradient, against the float64 reference.

Interpreted where there is no GPU; there bf16 is rounded towards zero (the interpreter's doing), so
its rows are twice as loose as a GPU's rounding to nearest would need.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alignmixup.ops.align import _align_mix, align_mix
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

from alignmixup.ops.triton import (  # noqa: E402
    align as _triton,
    cost as _triton_cost,
    product as _triton_product,
    sinkhorn_large as _triton_large,
    sinkhorn_small as _triton_small,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PERM = torch.tensor([2, 0, 1], device=DEVICE)
LAM = torch.tensor([0.3, 0.85, 0.6], device=DEVICE)

# Relative error of the result, in the norm. Half precision: its last bit, no more, in what comes
# out; what goes on inside is good to 1e-5.
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 6e-3), (torch.float16, 5e-4)]
dtypes = pytest.mark.parametrize(("dtype", "rtol"), DTYPES)


def random_features(b: int, n: int, c: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * n + c)
    return torch.randn(b, n, c, generator=rng).relu().to(DEVICE, dtype)


def relative_error(one: Tensor, other: Tensor) -> float:
    assert torch.isfinite(one).all()
    return ((one.double() - other).norm() / other.norm()).item()


def check(
    features: Tensor, rtol: float, perm: Tensor = PERM, lam: Tensor = LAM, **settings
) -> None:
    """Output and gradient of the kernels, and their memory format, against the reference."""
    x = features.detach().requires_grad_()
    exact_x = features.detach().double().requires_grad_()
    mixed = align_mix(x, perm, lam, backend="triton", **settings)
    exact = align_mix(exact_x, perm, lam.double(), backend="reference", **settings)
    assert mixed.dtype == features.dtype
    assert mixed.stride() == features.stride()
    assert relative_error(mixed, exact) < rtol
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(5)).to(mixed)
    mixed.backward(grad)
    exact.backward(grad.double())
    assert relative_error(x.grad, exact_x.grad) < rtol


# ---- every size, dtype, side ---------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    ("n", "c"),
    [
        (1, 5),
        (16, 70),
        (81, 37),
        *(pytest.param(n, c, marks=pytest.mark.slow) for n, c in ((3, 70), (49, 5), (64, 33))),
    ],
)
def test_any_size(n: int, c: int, dtype: torch.dtype, rtol: float) -> None:
    check(random_features(3, n, c, dtype), rtol, num_iters=8)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["anchor", "partner"])
@pytest.mark.parametrize("last", ["rows", "columns"])
@pytest.mark.parametrize(
    ("n", "num_iters"),
    [
        (9, 0),
        (9, 1),
        (9, 12),
        (65, 1),
        *(pytest.param(65, k, marks=pytest.mark.slow) for k in (0, 12)),
    ],
)
def test_any_side(keep: str, last: str, num_iters: int, n: int) -> None:
    check(random_features(3, n, 20), 1e-5, keep=keep, last=last, num_iters=num_iters)


@pytest.mark.parametrize(("keep", "last"), [("anchor", "rows"), ("partner", "columns")])
def test_any_side_with_all_size_classes_off(
    monkeypatch: pytest.MonkeyPatch, keep: str, last: str
) -> None:
    """As where programs cannot wait for each other: costs, iterations, interpolation apart."""
    monkeypatch.setattr("alignmixup.ops.size_classes.SIZE_CLASSES", ())
    check(random_features(3, 33, 20), 1e-5, keep=keep, last=last, num_iters=1)


def test_partial_sums_of_costs_with_all_size_classes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignmixup.ops.size_classes.SIZE_CLASSES", ())
    check(random_features(3, 33, 300), 1e-5, num_iters=2)


@pytest.mark.parametrize("n", [4, 35])
def test_some_channels_of_wider_features(n: int) -> None:
    wide = random_features(3, n, 14)
    mixed = align_mix(wide[..., 2:12], PERM, LAM, num_iters=2, backend="triton")
    expected = align_mix(wide[..., 2:12].contiguous(), PERM, LAM, num_iters=2, backend="triton")
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("n", [9, pytest.param(66, marks=pytest.mark.slow)])
def test_tol(n: int) -> None:
    features = (
        random_features(3, n, 12) * torch.tensor([0.3, 1.0, 3.0], device=DEVICE)[:, None, None]
    )
    check(features, 1e-5, num_iters=40, tol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("h", "w"), [(4, 4), (3, 5), (9, 8)])
@dtypes
def test_maps_of_either_memory_format(h, w, memory_format, dtype, rtol) -> None:
    maps = random_features(3, h * w, 20, dtype).transpose(1, 2).reshape(3, 20, h, w)
    check(maps.contiguous(memory_format=memory_format), rtol, num_iters=5)


@pytest.mark.parametrize("n", [4, pytest.param(65, marks=pytest.mark.slow)])
def test_tokens_of_a_longer_sequence(n: int) -> None:
    sequence = random_features(3, n + 1, 10)
    mixed = align_mix(sequence[:, 1:], PERM, LAM, num_iters=5, backend="triton")
    expected = align_mix(sequence[:, 1:].contiguous(), PERM, LAM, num_iters=5, backend="triton")
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("keep", ["anchor", "partner"])
@pytest.mark.parametrize("n", [9, pytest.param(65, marks=pytest.mark.slow)])
def test_a_sample_may_be_a_partner_twice_or_never(keep: str, n: int) -> None:
    check(random_features(3, n, 7), 1e-5, perm=PERM.new_tensor([1, 1, 2]), keep=keep, num_iters=3)


@pytest.mark.parametrize("keep_partner", [False, True])
def test_products_of_more_rows_than_fit_two_blocks(keep_partner: bool) -> None:
    n, perm = 131, PERM.new_tensor([1, 1, 2])
    x, R = random_features(3, n, 5), random_features(3, n, n) / n
    mixed = _triton_product.mix(x, perm, LAM, R / n, keep_partner)
    grad = _triton_product.backward(x, perm, LAM, R / n, keep_partner)
    exact_x, exact_R, lam = x.double(), R.double(), LAM.double().view(3, 1, 1)
    if keep_partner:
        exact = lam * exact_R.mT @ exact_x + (1 - lam) * exact_x[perm]
        own, others = lam * exact_R @ exact_x, (1 - lam) * exact_x
    else:
        exact = lam * exact_x + (1 - lam) * exact_R @ exact_x[perm]
        own, others = lam * exact_x, (1 - lam) * exact_R.mT @ exact_x
    assert relative_error(mixed, exact) < 1e-5
    assert relative_error(grad, own.index_add(0, perm, others)) < 1e-5


@pytest.mark.parametrize("keep", ["anchor", "partner"])
def test_partners_are_found_in_large_batches(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    monkeypatch.setattr(_triton_product, "LOOKUP", 2)  # of five
    perm, lam = PERM.new_tensor([4, 3, 3, 0, 3]), torch.linspace(0.1, 0.9, 5, device=DEVICE)
    check(random_features(5, 4, 3), 1e-5, perm=perm, lam=lam, keep=keep, num_iters=2)


# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [9, pytest.param(65, marks=pytest.mark.slow)])
@dtypes
def test_all_of_the_anchor_is_the_anchor_bit_for_bit(n, dtype, rtol) -> None:
    features = random_features(3, n, 20, dtype)
    mixed = align_mix(features, PERM, torch.ones((), device=DEVICE), num_iters=5, backend="triton")
    assert torch.equal(mixed, features)


@pytest.mark.parametrize("n", [16, pytest.param(65, marks=pytest.mark.slow)])
def test_the_plan_keeps_the_mean_over_positions(n: int) -> None:
    features = random_features(3, n, 40)
    mixed = align_mix(features, PERM, LAM, num_iters=40, backend="triton")
    w = LAM[:, None]
    mean = w * features.mean(1) + (1 - w) * features[PERM].mean(1)
    torch.testing.assert_close(mixed.mean(1), mean, atol=2e-6, rtol=1e-5)


@dtypes
@pytest.mark.parametrize("n", [16, pytest.param(65, marks=pytest.mark.slow)])
def test_costs_of_features_far_from_the_origin(n: int, dtype: torch.dtype, rtol: float) -> None:
    # |a|^2 is about 2000 and distances are about 200, so in float32 the sum of squares is off by
    # 2000 * 2^-24 and more. Centerd, a cost must be good to a hundredth of eps.
    eps, c = 0.1, 200
    features = (random_features(3, n, c) + 3).to(dtype)
    plan = _align_mix(features, PERM, LAM, False, eps, 0, 0.0, "columns", "triton")[1]
    a = features.double()
    cost = torch.cdist(a, a[PERM]) ** 2
    # With no iteration P_ij is exp(-C_ij / eps) over its column's sum: logs of it are costs.
    error = -eps * plan.double().log() - cost
    seen = plan > 1e-30
    column = torch.where(seen, error, torch.nan).nanmean(1, keepdim=True)
    assert a.square().sum(-1).mean() > 1800
    assert seen.sum() > n
    assert (error - column)[seen].abs().max() < 1e-2 * eps


# ---- which path ran ------------------------------------------------------------------------------


def test_the_size_decides_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignmixup.ops.size_classes.SIZE_CLASSES", ())  # all off
    ran = []
    for module, name in (
        (_triton_small, "align_mix"),
        (_triton_cost, "pair_costs"),
        (_triton_small, "solve"),
        (_triton_large, "solve"),
        (_triton_product, "mix"),
        (_triton_product, "backward"),
    ):
        function = getattr(module, name)
        label = f"{module.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(
            module,
            name,
            lambda *a, f=function, label=label, **k: (ran.append(label), f(*a, **k))[1],
        )
    for n in (32, 33, 64, 65):
        x = random_features(3, n, 4).requires_grad_()
        align_mix(x, PERM, LAM, num_iters=1, backend="triton").sum().backward()
    small = ["cost.pair_costs", "sinkhorn_small.solve", "product.mix", "product.backward"]
    large = ["cost.pair_costs", "sinkhorn_large.solve", "product.mix", "product.backward"]
    assert ran == ["sinkhorn_small.align_mix", "product.backward", *small, *small, *large]


def test_float64_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: it computes in"):
        align_mix(random_features(3, 4, 4).double(), PERM, LAM, backend="triton")


@pytest.mark.unchecked_shapes
def test_compiled_it_is_the_same() -> None:
    def loss(x: Tensor) -> Tensor:
        return align_mix(x, PERM, LAM, num_iters=4, backend="triton").square().sum()

    x = random_features(3, 4, 6).requires_grad_()
    expected = torch.autograd.grad(loss(x), x)[0]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], expected)


# ---- on a GPU ------------------------------------------------------------------------------------

BIG = [(16, 512), (49, 2048), (64, 512), (196, 2048), (100, 300)]


def big(n: int, c: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    perm = torch.randperm(128, generator=rng).to(DEVICE)
    return random_features(128, n, c, dtype), perm, torch.rand(128, generator=rng).to(DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "c"), BIG)
@pytest.mark.parametrize(("dtype", "rtol"), [(d, t / 2) for d, t in DTYPES])
def test_big_batches(n: int, c: int, dtype: torch.dtype, rtol: float) -> None:
    features, perm, lam = big(n, c, dtype)
    # A cost is about 0.7 c here and rounded in its 24th bit; divided by eps it is an exponent. The
    # kernels sum it from three products of half the bits: four times what float32 is off by.
    exact, plain = (
        align_mix(features.to(d), perm, lam.to(d), backend="reference")
        for d in (torch.float64, torch.float32)
    )
    rtol += 4 * relative_error(plain, exact)
    for positions_last in (False, True):
        x = features.transpose(1, 2).contiguous().transpose(1, 2) if positions_last else features
        check(x, rtol, perm=perm, lam=lam, num_iters=100)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(("n", "c"), [(16, 512), (196, 64)])
def test_a_captured_graph_replays_it(n: int, c: int) -> None:
    features, perm, lam = big(n, c, torch.bfloat16)
    x = features.clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        mixed = align_mix(x, perm, lam, backend="triton")
        return mixed, torch.autograd.grad(mixed.float().square().sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # New numbers in the same places.
    with torch.no_grad():
        x.copy_(features.flip(0) * 1.1)
    perm.copy_(perm.roll(1))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "c"), [*BIG, (100, 1000), (784, 768), (1000, 512)])
def test_every_call_gives_the_same_bits(n: int, c: int) -> None:
    """A tile that is read before it has arrived shows in some of many calls, and in large maps."""
    x, perm, lam = (value[:16] for value in big(n, c, torch.bfloat16))
    perm = perm.argsort()

    def call() -> tuple[Tensor, ...]:
        mixed, plan = _align_mix(x, perm, lam, False, 0.1, 100, 0.0, "columns", "triton")
        return mixed, plan, _triton.align_mix_backward(mixed, perm, lam, plan, False)

    first = call()
    differs = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    for _ in range(150):
        torch.full_like(x, 3e33)  # what the next output finds in its memory
        differs |= torch.stack([(a != b).any() for a, b in zip(call(), first, strict=True)])
    assert not differs.any(), differs.tolist()


@pytest.mark.gpu
@pytest.mark.unchecked_shapes
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(("n", "c"), [(16, 64), (100, 64)])
def test_inductor_agrees(n: int, c: int) -> None:
    features, perm, lam = big(n, c, torch.bfloat16)

    def loss(x: Tensor) -> Tensor:
        return align_mix(x * 1.5, perm, lam).float().square().sum()

    x = features.clone().requires_grad_()
    expected = torch.autograd.grad(loss(x), x)[0]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)[0]
    assert relative_error(compiled, expected.double()) < 1e-2  # x * 1.5 may stay in float32


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "c"), [(16, 512), (64, 512), (196, 2048)])
def test_extra_memory_is_no_more_than_twice_the_features(n: int, c: int) -> None:
    features, perm, lam = big(n, c, torch.bfloat16)
    _triton.align_mix(features, perm, lam, False, 0.1, 10, None, "columns")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, plan = _triton.align_mix(features, perm, lam, False, 0.1, 10, None, "columns")
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - plan.nbytes
    assert extra <= 2 * features.nbytes
