"""Squared distances: against a loop, in full float32 whatever is switched on, in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignmixup.ops._precision import full_float32
from alignmixup.ops.cost import pairwise_cost

HAS_SWITCHES = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and newer


def features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


def loop_cost(a: Tensor, b: Tensor) -> Tensor:
    """The definition, in float64, by the tensor of differences that the code must not form."""
    a, b = a.double(), b.double()
    return (a.unsqueeze(-1) - b.unsqueeze(-2)).square().sum(-3)


@pytest.fixture
def _fast_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


# ---- laws ----------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 6),
    m=st.integers(1, 6),
    c=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10_000),
)
def test_distances_are_distances(n: int, m: int, c: int, scale: float, seed: int) -> None:
    a, b = scale * features(2, c, n, seed=seed), scale * features(2, c, m, seed=seed + 1)
    cost, atol = pairwise_cost(a, b), 1e-13 * scale**2 * c
    assert (cost >= 0).all()
    torch.testing.assert_close(cost, pairwise_cost(b, a).mT, atol=atol, rtol=1e-12)
    torch.testing.assert_close(cost, loop_cost(a, b), atol=atol, rtol=1e-12)
    own = pairwise_cost(a, a).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(own, torch.zeros_like(own), atol=10 * atol, rtol=0)
    shift = scale * features(2, c, 1, seed=seed + 2)
    torch.testing.assert_close(pairwise_cost(a + shift, b + shift), cost, atol=50 * atol, rtol=1e-9)


# ---- agreements ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.float16, 1e-5),  # narrow features are widened as they are: nothing is lost after
        (torch.bfloat16, 1e-5),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_against_the_definition(shape: tuple[int, ...], dtype: torch.dtype, rtol: float) -> None:
    a, b = features(*shape, 64, 9, dtype=dtype), features(*shape, 64, 7, seed=1, dtype=dtype)
    cost = pairwise_cost(a, b)
    assert cost.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(cost.double(), loop_cost(a, b), atol=0, rtol=rtol)


def test_two_types_meet_in_the_wider() -> None:
    a, b = features(2, 8, 3, dtype=torch.bfloat16), features(2, 8, 3, seed=1)
    assert pairwise_cost(a, b).dtype == torch.float64
    torch.testing.assert_close(pairwise_cost(a, b), loop_cost(a, b))


def test_features_far_from_the_origin_keep_their_digits() -> None:
    """After a ReLU all features lie on one side: |a|^2 is far larger than the distances."""
    a, b = (1000 + features(3, 64, 16, seed=s, dtype=torch.float32) for s in (0, 1))
    exact = loop_cost(a, b)
    torch.testing.assert_close(pairwise_cost(a, b).double(), exact, atol=0.01, rtol=0)
    naive = a.square().sum(1)[:, :, None] + b.square().sum(1)[:, None] - 2 * a.mT @ b
    assert (naive.double() - exact).abs().max() > 1  # what would be lost


def test_equal_points_are_near_zero_in_float32() -> None:
    """An error of eps in a cost is a factor e in the plan, so it must stay well below 0.1."""
    a = (5 + features(3, 512, 16, dtype=torch.float32)).relu()
    own = pairwise_cost(a, a).diagonal(dim1=1, dim2=2)
    assert own.max() < 0.01
    assert own.min() >= 0


def test_no_gradient_flows_and_features_are_left_alone() -> None:
    a = features(2, 8, 3).requires_grad_()
    kept = a.detach().clone()
    assert not pairwise_cost(a, a).requires_grad
    assert torch.equal(a, kept)


# ---- precision -----------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Records, for each matrix product: the types, and which precision was allowed just then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[set[torch.dtype], str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.seen.append(({t.dtype for t in args}, precision_now()))
        return func(*args, **(kwargs or {}))


def precision_now() -> str:
    """The precision of products on a CPU, in the words of torch 2.9 and newer."""
    if HAS_SWITCHES:
        return torch.backends.mkldnn.matmul.fp32_precision
    return {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")


@pytest.mark.usefixtures("_fast_products")
@pytest.mark.parametrize("shape", [(4, 256, 16), (256, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_fast_products_do_not_touch_it(dtype: torch.dtype, shape) -> None:
    a, b = features(*shape, dtype=dtype), features(*shape, seed=1, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        cost = pairwise_cost(a, b)
        a.mT @ b  # the caller's own products stay the caller's
    assert products.seen[0] == ({torch.float32}, "ieee")
    assert products.seen[-1] == ({torch.bfloat16}, "bf16")
    torch.testing.assert_close(cost.double(), loop_cost(a, b), atol=0, rtol=1e-5)


def settings_now() -> tuple[object, ...]:
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul) if HAS_SWITCHES else ()
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.is_autocast_enabled("cpu"),
        *(matmul.fp32_precision for matmul in matmuls),
    )


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.usefixtures("_fast_products")
def test_the_switches_are_put_back(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    before = settings_now()
    pairwise_cost(features(2, 8, 3), features(2, 8, 3))
    assert settings_now() == before
    with full_float32(torch.device("cpu")):
        assert precision_now() == "ieee"
    assert settings_now() == before
    with pytest.raises(ZeroDivisionError), full_float32(torch.device("cpu")):
        raise ZeroDivisionError
    assert settings_now() == before


@pytest.mark.usefixtures("_fast_products")
def test_the_last_of_several_threads_puts_the_switches_back() -> None:
    before = settings_now()
    first, second = ExitStack(), ExitStack()
    for thread in (first, second):
        thread.enter_context(full_float32(torch.device("cpu")))
    first.close()
    assert precision_now() == "ieee"  # the second still computes
    second.close()
    assert settings_now() == before


# ---- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numel = max(self.numel, *made, 0)
        return out


def test_the_differences_are_never_formed() -> None:
    a, b = features(2, 128, 64, dtype=torch.float32), features(2, 128, 64, dtype=torch.float32)
    with Largest() as largest:
        pairwise_cost(a, b)
    assert largest.numel <= max(2 * 128 * 64, 2 * 64 * 64)
    with Largest() as largest:
        loop_cost(a, b)
    assert largest.numel == 2 * 128 * 64 * 64  # what that would be, and that it would be seen


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize(
    ("a", "b"), [((2, 8, 3), (2, 7, 3)), ((2, 8, 3), (3, 8, 3)), ((8, 3), (2, 8, 3))]
)
def test_shapes_that_do_not_agree_are_named(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must agree in batch and channels") as error:
        pairwise_cost(torch.ones(a), torch.ones(b))
    assert f"got {list(a)} and {list(b)}" in str(error.value)
