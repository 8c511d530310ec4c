"""Draws have the distribution they are named after, and come from the generator alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scipy.stats
import torch
from torch import Tensor

from alignmixup.mixers import sampling
from alignmixup.mixers.sampling import (
    LEAST_ALPHA,
    sample_case,
    sample_normal,
    sample_parts,
    sample_share,
    sample_unit,
)

DRAWS = 2000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_follows(draws: Tensor, distribution) -> None:
    assert scipy.stats.kstest(draws.double().numpy(), distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("ahead", [0.0, 1.0])
@pytest.mark.parametrize("alpha", [0.4, 1.5])
@pytest.mark.parametrize("size", [None, DRAWS])
def test_shares_of_a_batch_and_of_samples_are_beta(
    size: int | None, alpha: float, ahead: float
) -> None:
    rng = generator()
    count = DRAWS if size is None else 1
    drawn = [sample_share(alpha, size, rng, ahead=ahead) for _ in range(count)]
    assert_follows(torch.stack(drawn).flatten(), scipy.stats.beta(alpha + ahead, alpha))


@pytest.mark.parametrize("concentration", [0.3, 2.5])
def test_logarithms_of_gammas_are_those_of_gammas(concentration: float) -> None:
    drawn = sampling._sample_log_gamma(torch.full((DRAWS,), concentration).double(), generator())
    assert_follows(drawn.exp(), scipy.stats.gamma(concentration))


def test_below_the_least_alpha_shares_have_the_same_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way by logarithms, at an alpha that float32 still resolves."""
    monkeypatch.setattr(sampling, "LEAST_ALPHA", 1.0)
    assert_follows(sample_share(0.6, DRAWS, generator()), scipy.stats.beta(0.6, 0.6))
    assert_follows(sample_share(0.6, DRAWS, generator(), ahead=1.0), scipy.stats.beta(1.6, 0.6))
    # A part of four: each share is Beta(alpha, 3 alpha).
    parts = sample_parts(0.6, 4 * DRAWS, 4, generator())
    assert_follows(parts[::4], scipy.stats.beta(0.6, 1.8))


@pytest.mark.parametrize("alpha", [1e-300, LEAST_ALPHA / 2, LEAST_ALPHA, 0.7])
@pytest.mark.parametrize("part_size", [1, 3, 4])
def test_parts_sum_to_one(alpha: float, part_size: int) -> None:
    shares = sample_parts(alpha, 8, part_size, generator())
    assert ((shares >= 0) & (shares <= 1)).all()
    for part in torch.split(shares, part_size):  # the last one may be smaller
        torch.testing.assert_close(part.sum(), torch.tensor(1.0))


def test_parts_are_dirichlet() -> None:
    parts = sample_parts(0.7, 4 * DRAWS, 4, generator()).view(-1, 4)
    for one in parts.unbind(1):
        assert_follows(one, scipy.stats.beta(0.7, 2.1))


@pytest.mark.parametrize(
    "draw",
    [
        *(lambda rng, a=a: sample_share(a, 5, rng) for a in (LEAST_ALPHA / 2, 0.7)),
        *(lambda rng, a=a: sample_parts(a, 8, 4, rng) for a in (LEAST_ALPHA / 2, 0.7)),
        lambda rng: sample_unit((5,), rng),
        lambda rng: sample_normal((5,), rng),
    ],
)
def test_draws_are_float32_and_a_function_of_the_generator(
    draw: Callable[[torch.Generator], Tensor],
) -> None:
    before = torch.get_rng_state()
    first = draw(generator(3))
    assert first.dtype == torch.float32
    assert torch.equal(first, draw(generator(3)))
    assert not torch.equal(first, draw(generator(4)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("point", [0.0, 0.5, 1.0])
def test_a_case_without_weight_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, point: float
) -> None:
    """Nor at the ends of the unit interval, where a sum of weights may be rounded."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(point))
    weights = {"never": 0.0, "first": 0.1, "no": 0.0, "last": 0.2, "not": 0.0}
    assert sample_case(weights, generator()) == ("last" if point else "first")
