"""The batched grid cut against exact minima: brute force, maximum flow on the Ishikawa graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from alignmixup.ops.gridcut import PottsGrid, _Edges, _relax, cut_ordered, grid_adjacency
from alignmixup.ops.puzzle import Energy, puzzle_energy
from gridcut_oracles import (
    brute_force_labels,
    loop_energy,
    max_flow_labels,
    ordered_energy,
    salient_pictures,
)


def random_energy(seed: int, num_labels: int, n: int, m: int, batch: int = 3) -> Energy:
    """Any costs, convex or not, and any weights that are not negative."""
    rng = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    return Energy(rand(batch, num_labels, n, m), rand(batch, n - 1, m), rand(batch, n, m - 1))


# ---- laws ----------------------------------------------------------------------------------------

sides = st.integers(1, 6)


@given(seed=st.integers(0, 10_000), num_labels=st.integers(2, 5), n=sides, m=sides)
def test_never_above_the_unary_solution(seed: int, num_labels: int, n: int, m: int) -> None:
    e = random_energy(seed, num_labels, n, m)
    cut = cut_ordered(e.unary, e.down, e.right)
    alone = ordered_energy(e.unary, e.down, e.right, e.unary.argmin(1))
    assert (cut.energy <= alone + 1e-12).all()
    assert cut.labels.min() >= 0
    assert cut.labels.max() < num_labels
    energy = ordered_energy(e.unary, e.down, e.right, cut.labels)
    torch.testing.assert_close(cut.energy, energy, atol=1e-12, rtol=0)
    expected = loop_energy(e.unary[0], e.down[0], e.right[0], cut.labels[0])
    assert float(energy[0]) == pytest.approx(expected, abs=1e-12)


@given(seed=st.integers(0, 10_000), n=sides, m=sides)
def test_no_single_change_helps(seed: int, n: int, m: int) -> None:
    """After enough sweeps a cut is a local minimum."""
    e = random_energy(seed, 3, n, m, batch=1)
    cut = cut_ordered(e.unary, e.down, e.right, num_sweeps=20)
    for row in range(n):
        for column in range(m):
            for label in range(3):
                other = cut.labels.clone()
                other[0, row, column] = label
                energy = ordered_energy(e.unary, e.down, e.right, other)
                assert float(energy) >= float(cut.energy) - 1e-12


def test_without_weights_each_block_decides_alone() -> None:
    e = random_energy(0, 3, 5, 4)
    cut = cut_ordered(e.unary, 0 * e.down, 0 * e.right)
    assert torch.equal(cut.labels, e.unary.argmin(1))


def test_heavy_weights_give_one_label() -> None:
    """A bumpy unary, weights that forbid any jump: the label that is cheapest for all."""
    e = random_energy(0, 3, 4, 4)
    cut = cut_ordered(e.unary, 100 + e.down, 100 + e.right)
    best = e.unary.sum((2, 3)).argmin(1)
    assert torch.equal(cut.labels, best.view(-1, 1, 1).expand(-1, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_its_members(dtype: torch.dtype) -> None:
    e = random_energy(1, 3, 6, 6, batch=5)
    unary, down, right = (t.to(dtype) for t in (e.unary, e.down, e.right))
    together = cut_ordered(unary, down, right)
    assert together.energy.dtype == dtype
    for i in range(5):
        alone = cut_ordered(unary[i : i + 1], down[i : i + 1], right[i : i + 1])
        assert torch.equal(alone.labels[0], together.labels[i])


@pytest.mark.parametrize("num_labels", [3, 5])
def test_relaxations_end_at_the_real_minimum_of_quadratic_costs(num_labels: int) -> None:
    """sum_i c_i (z_i - t_i)^2 + sum_ij w_ij (z_i - z_j)^2 / (L - 1)^2: a linear system."""
    n, m, top = 4, 3, num_labels - 1
    e = random_energy(3, 2, n, m)
    c, t = 0.2 + e.unary[:, :1], top * (0.2 + 0.6 * e.unary[:, 1:])
    levels = torch.arange(num_labels, dtype=torch.float64).view(-1, 1, 1)
    relaxed = _relax(c * (levels - t).square(), _Edges.of(e.down, e.right), 200)
    number = torch.arange(n * m).view(n, m)
    for i in range(len(relaxed)):
        weights = torch.zeros(n * m, n * m, dtype=torch.float64)
        weights[number[:-1].flatten(), number[1:].flatten()] = e.down[i].flatten() / top**2
        weights[number[:, :-1].flatten(), number[:, 1:].flatten()] = e.right[i].flatten() / top**2
        weights = weights + weights.T
        system = torch.diag(c[i].flatten() + weights.sum(1)) - weights
        exact = torch.linalg.solve(system, (c * t)[i].flatten())
        assert 0 < exact.min() < exact.max() < top
        torch.testing.assert_close(relaxed[i].flatten(), exact, atol=1e-6, rtol=0)


# ---- agreement with exact minima -----------------------------------------------------------------


@pytest.mark.parametrize("num_labels", [2, 3, 4])
def test_the_oracles_agree(num_labels: int) -> None:
    e = random_energy(2, num_labels, 2, 2, batch=20)
    for one in zip(e.unary, e.down, e.right, strict=True):
        by_flow, by_trying = max_flow_labels(*one), brute_force_labels(*one)
        assert loop_energy(*one, by_flow) == pytest.approx(loop_energy(*one, by_trying), abs=1e-5)


# Measured: 0, 0.001, 0.010 and 0.08 %. Conditional modes from the unary solution: 0.05, 0.25, 0.7
# and 2 %, which the bound of half a per cent would not let pass.
@pytest.mark.parametrize(("n", "bound"), [(2, 1e-4), (4, 1e-4), (8, 5e-4), (16, 3e-3)])
def test_puzzle_energies_are_near_their_exact_minimum(n: int, bound: float) -> None:
    """250 pairs at each resolution, lam uniform: the mean; a single one is up to 1 % above."""
    pictures, rng = salient_pictures(250), torch.Generator().manual_seed(n)
    perm, lam = torch.randperm(250, generator=rng), torch.rand(250, generator=rng)
    e = puzzle_energy(pictures.images, pictures.saliency, perm, lam, num_blocks=n)
    assert min(float(e.down.min()), float(e.right.min())) > 0
    cut = cut_ordered(e.unary, e.down, e.right)
    solve = brute_force_labels if n == 2 else max_flow_labels
    exact = torch.stack([solve(*one) for one in zip(e.unary, e.down, e.right, strict=True)])
    least = ordered_energy(e.unary, e.down, e.right, exact)
    gap = cut.energy.double().sum() / least.double().sum() - 1
    assert -1e-5 < float(gap) < bound
    alone = ordered_energy(e.unary, e.down, e.right, e.unary.argmin(1))
    assert (cut.energy <= alone + 1e-6).all()
    if n > 2:  # a cut worth its name is far below the unary solution
        assert float(alone.sum() / cut.energy.sum()) > 1.01


# ---- Potts ---------------------------------------------------------------------------------------


def potts_energy(unary: Tensor, labels: Tensor, likeness: Tensor, weight: float) -> Tensor:
    """sum_i U_i(z_i) - weight sum_ij S(z_i, z_j), over each edge once."""
    own = unary.gather(2, labels.unsqueeze(2)).sum((1, 2))
    adjacent = grid_adjacency(round(unary.shape[1] ** 0.5), unary)
    like = likeness[labels.unsqueeze(2), labels.unsqueeze(1)]
    return own - weight * (adjacent * like).sum((1, 2)) / 2


@given(seed=st.integers(0, 10_000), side=st.integers(1, 4), num_labels=st.integers(2, 6))
def test_a_sweep_never_raises_the_potts_energy(seed: int, side: int, num_labels: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    unary = torch.rand(4, side * side, num_labels, generator=rng, dtype=torch.float64)
    labels = torch.randint(num_labels, (4, side * side), generator=rng)
    likeness = torch.rand(num_labels, num_labels, generator=rng, dtype=torch.float64) * 0.35
    likeness = likeness + likeness.T
    likeness.fill_diagonal_(1)
    grid = PottsGrid.of(side, 0.4, unary)
    for _ in range(4):
        swept = grid.sweep(unary, labels, likeness.expand(4, -1, -1), 1)
        after = potts_energy(unary, swept, likeness, 0.4)
        assert (after <= potts_energy(unary, labels, likeness, 0.4) + 1e-12).all()
        labels = swept


def test_a_potts_sweep_from_many_starts_finds_the_minimum() -> None:
    rng = torch.Generator().manual_seed(0)
    unary = torch.rand(4, 3, generator=rng, dtype=torch.float64)
    every = torch.cartesian_prod(*[torch.arange(3)] * 4)
    many = unary.expand(len(every), -1, -1).contiguous()
    eye = torch.eye(3, dtype=torch.float64)
    least = potts_energy(many, every, eye, 0.3).min()
    found = PottsGrid.of(2, 0.3, unary).sweep(
        many[:20], every[torch.randperm(81, generator=rng)[:20]], eye.expand(20, -1, -1), 3
    )
    assert float(potts_energy(many[:20], found, eye, 0.3).min()) == pytest.approx(float(least))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [2, 16])
def test_cuda_finds_the_same_energy_in_a_captured_graph(n: int) -> None:
    e = random_energy(3, 3, n, n, batch=64)
    here = cut_ordered(e.unary, e.down, e.right)
    unary, down, right = (t.cuda() for t in (e.unary, e.down, e.right))
    cut_ordered(unary, down, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there = cut_ordered(unary, down, right)
    graph.replay()
    torch.testing.assert_close(there.energy.cpu(), here.energy, atol=1e-9, rtol=1e-9)
