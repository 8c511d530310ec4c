"""Products of float32 features in bf16, which ``align_mix`` requests under autocast to bf16.

    A~ = r P bf16(A'),   C = costs of features split into pairs of bf16, 16 bits instead of 8

The kernels run interpreted where there is no GPU; there bf16 is rounded towards zero, so that a
number is off by up to 2^-7 instead of 2^-8.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alignmixup.ops import align
from triton_interpreter import interpret_kernels

pytest.importorskip("triton")
interpret_kernels()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, NUM_ITERS = 0.1, 4
PERM = torch.tensor([2, 0, 1], device=DEVICE)
LAM = torch.tensor([0.3, 0.85, 0.6], device=DEVICE)
sizes = pytest.mark.parametrize("n", [35, 70])  # two size classes
kept = pytest.mark.parametrize("keep_partner", [False, True])


def random_features(n: int) -> Tensor:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(3, n, 12, generator=rng).relu().to(DEVICE)


def mix(x: Tensor, lam: Tensor, keep_partner: bool, backend: str, half: bool) -> list[Tensor]:
    """Mixed features, plan, and the gradient for the features as that of the output."""
    settings = (keep_partner, EPS, NUM_ITERS, 0.0, "rows" if keep_partner else "columns", backend)
    mixed, plan = align._align_mix(x, PERM, lam, *settings, half)
    grad = align._align_mix_backward(x, PERM, lam, plan, keep_partner, backend, half)
    return [mixed, plan, grad]


def relative_error(value: Tensor, exact: Tensor) -> float:
    assert value.dtype == torch.float32
    assert torch.isfinite(value).all()
    return ((value.double() - exact).norm() / exact.norm()).item()


@sizes
@kept
def test_features_have_the_digits_of_bf16_and_plans_more(n: int, keep_partner: bool) -> None:
    x = random_features(n)
    found = mix(x, LAM, keep_partner, "triton", half=True)
    exact = mix(x.double(), LAM.double(), keep_partner, "reference", half=False)
    mixed, plan, grad = (relative_error(a, b) for a, b in zip(found, exact, strict=True))
    assert 1e-4 < mixed < 2**-7  # less would be products in float32
    assert 1e-4 < grad < 2**-7
    # The error of a plan is linear in that of its costs, and pairs have 8 bits more than bf16: the
    # error is 2^8 times less than for features in bf16. Half of these bits are for chance.
    rounded = mix(x.bfloat16().double(), LAM.double(), keep_partner, "reference", half=False)
    assert plan < relative_error(rounded[1].float(), exact[1]) / 2**4


@sizes
def test_the_kept_features_are_exact(n: int) -> None:
    x = random_features(n)
    mixed, _, grad = mix(x, torch.ones_like(LAM), False, "triton", half=True)
    assert torch.equal(mixed, x)
    assert torch.equal(grad, x)
    mixed, _, _ = mix(x, torch.zeros_like(LAM), True, "triton", half=True)
    assert torch.equal(mixed, x[PERM])


def requested(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> bool:
    """Whether ``align_mix`` of the features asks for products in bf16."""
    calls = []

    def recorded(*args: object) -> tuple[Tensor, None]:
        calls.append(args[-1])
        return torch.empty_like(x), None

    monkeypatch.setattr(align, "_align_mix", recorded)
    align.align_mix(x, PERM, LAM, backend="reference")
    return calls == [True]


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, False),
        (torch.float32, None, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.float64, torch.bfloat16, False),
    ],
)
def test_only_float32_features_under_autocast_to_bf16_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    expected: bool,
) -> None:
    with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
        assert requested(monkeypatch, random_features(4).to(dtype)) == expected


@pytest.mark.unchecked_shapes
@pytest.mark.parametrize("is_on", [False, True])
def test_a_compiled_graph_asks_as_eager_code_does(is_on: bool) -> None:
    asked = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        asked.extend(n.args[-1] for n in graph.graph.nodes if "align_mix" in str(n.target))
        return graph

    def loss(x: Tensor) -> Tensor:
        return align.align_mix(x, PERM, LAM, num_iters=2).square().sum()

    x = random_features(4)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=is_on):
        expected = loss(x)
        assert torch.equal(torch.compile(loss, fullgraph=True, backend=record)(x), expected)
    assert asked == [is_on]
