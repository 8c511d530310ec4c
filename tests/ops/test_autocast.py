"""Autocast is for the layers of a network: no op may change a bit under it.

Half precision inside a solver costs digits (bf16) or overflows (float16), whatever its inputs are.
The kernels of ``align_mix`` are the exception, see test_half_products.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alignmixup.contracts import soft_cross_entropy, softmax_bce
from alignmixup.ops.adain import adain, style_statistics
from alignmixup.ops.align import align_mix
from alignmixup.ops.blend import blend
from alignmixup.ops.cost import pairwise_cost
from alignmixup.ops.gradient_saliency import block_saliency
from alignmixup.ops.gridcut import cut_ordered
from alignmixup.ops.joint import JointCosts, assign_blocks, joint_objective
from alignmixup.ops.puzzle import puzzle_energy, transport
from alignmixup.ops.saliency import fine_grained_saliency
from alignmixup.ops.sinkhorn import sinkhorn


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def aligned(side: int, keep: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    features = (10 * rand(4, 32, side, side)).to(dtype).requires_grad_()
    mixed = align_mix(features, torch.arange(4).roll(1), rand(4, seed=1), keep=keep)
    mixed.square().sum().backward()
    assert features.grad is not None
    return [mixed, features.grad]


def joint() -> list[Tensor]:
    A = torch.eye(5) + 0.05 * rand(5, 5)
    costs = JointCosts(
        -rand(1, 5, 16).softmax(2), (A + A.mT)[None] / 2, torch.ones(1, 5) > 0, 0.02, 0.06, 13.3
    )
    shares = assign_blocks(costs, (5 * rand(2, 1, 5, 16)).long()).shares
    return [shares, joint_objective(costs, shares), joint_objective(costs, rand(1, 5, 16, 5))]


def puzzle() -> list[Tensor]:
    maps, perm = rand(3, 16, 16), torch.tensor([1, 2, 0])
    energy = puzzle_energy(rand(3, 3, 16, 16), maps, perm, rand(3, seed=2), num_blocks=4)
    cut = cut_ordered(energy.unary, energy.down, energy.right).labels
    moved = transport(rand(3, 3, 16, 16), block_saliency(maps, 4), rand(3, 4, 4) > 0.5)
    return [energy.unary, energy.down, energy.right, cut, moved]


OPS: dict[str, Callable[[], list[Tensor]]] = {
    "cost": lambda: [pairwise_cost(rand(2, 8, 49), rand(2, 8, 49, seed=1))],
    **{
        f"sinkhorn-{n}-{backend}": lambda n=n, backend=backend: [
            sinkhorn(100 * rand(3, n, n), backend=backend).plan
        ]
        for n in (16, 25, 49)
        for backend in ("auto", "reference")
    },
    "align-25": lambda: aligned(5, "anchor"),
    "align-49": lambda: aligned(7, "partner"),
    "align-25-half": lambda: aligned(5, "anchor", torch.float16),
    "blend": lambda: [blend(rand(3, 8), rand(3, 8, seed=1), rand(3, seed=2))],
    "joint": joint,
    "puzzle": puzzle,
    "saliency": lambda: [fine_grained_saliency(rand(2, 3, 16, 16))],
    "adain": lambda: [adain(rand(2, 4, 6, 6), style_statistics(9 * rand(2, 4, 6, 6, seed=1)))],
    "losses": lambda: [
        loss(rand(4, 5), rand(4, 5, seed=1).softmax(1))
        for loss in (soft_cross_entropy, softmax_bce)
    ],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_autocast_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    expected = OPS[name]()
    with torch.autocast("cpu", dtype=dtype):
        found = OPS[name]()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
