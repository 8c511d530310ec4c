"""Draws from one ``torch.Generator``, on whose device they are made.

With a CPU generator they are the same for every device of the images, and never synchronize with a
GPU. Their type is float32, whatever torch's default is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alignmixup.contracts import Draw

CLEAN = "clean"  # the case without mixing
LEAST_ALPHA = 0.01  # below it, gammas are smaller than the least float64


def probabilities(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the cases of positive weight with their probabilities."""
    total = sum(weights.values())
    return {case: weight / total for case, weight in weights.items() if weight > 0}


def sample_case(weights: Mapping[str, float], rng: torch.Generator) -> str:
    """Draw one case; ``weights`` need not sum to one."""
    total = sum(weights.values())
    point = float(torch.rand((), generator=rng, device=rng.device, dtype=torch.float64)) * total
    for case, weight in weights.items():
        point -= weight
        if point < 0:
            return case
    return [case for case, weight in weights.items() if weight > 0][-1]  # after rounding


def sample_perm(batch_size: int, rng: torch.Generator) -> Tensor:
    """Draw the partner of each sample: a permutation of the batch."""
    return torch.randperm(batch_size, generator=rng, device=rng.device)


def sample_share(
    alpha: float, size: int | None, rng: torch.Generator, *, ahead: float = 0.0
) -> Tensor:
    """Draw shares of the anchor from Beta(alpha + ahead, alpha): a scalar, or ``size`` of them."""
    shape = (2,) if size is None else (2, size)
    # Two gammas make a beta; torch.distributions.Beta takes no generator, hence the private op.
    # In float64: with a small alpha both gammas underflow float32, and 0 / 0 is NaN.
    concentration = torch.full(shape, alpha, dtype=torch.float64, device=rng.device)
    if ahead:
        concentration[0] += ahead
    if alpha < LEAST_ALPHA:
        log_g = _sample_log_gamma(concentration, rng)
        return torch.sigmoid(log_g[0] - log_g[1]).float()
    g = torch._standard_gamma(concentration, generator=rng)
    return (g[0] / g.sum(0)).float()


def sample_parts(alpha: float, size: int, part_size: int, rng: torch.Generator) -> Tensor:
    """Draw ``size`` shares; each part of ``part_size`` is from a symmetric Dirichlet."""
    concentration = torch.full((size,), alpha, dtype=torch.float64, device=rng.device)
    if alpha < LEAST_ALPHA:
        parts = torch.split(_sample_log_gamma(concentration, rng), part_size)
        return torch.cat([part.softmax(0) for part in parts]).float()
    # Normalized gammas are a Dirichlet draw; torch.distributions takes no generator.
    parts = torch.split(torch._standard_gamma(concentration, generator=rng), part_size)
    return torch.cat([part / part.sum() for part in parts]).float()


def _sample_log_gamma(concentration: Tensor, rng: torch.Generator) -> Tensor:
    """Draw logarithms of gammas: Gamma(a) is Gamma(a + 1) U^(1 / a)."""
    shape = concentration.shape
    unit = 1 - torch.rand(shape, dtype=torch.float64, generator=rng, device=rng.device)
    log_g = torch._standard_gamma(concentration + 1, generator=rng).log()
    return log_g + unit.log() / concentration


def sample_unit(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw uniformly from [0, 1), e.g. positions as fractions of the image."""
    return torch.rand(shape, generator=rng, device=rng.device, dtype=torch.float32)


def sample_normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw from the standard normal distribution."""
    return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.float32)


def sample_pairs(
    weights: Mapping[str, float],
    alpha: float,
    lam_per_sample: bool,
    batch_size: int,
    rng: torch.Generator,
) -> Draw:
    """Draw a case, the partners, and one share per batch or per sample."""
    case = sample_case(weights, rng)
    perm = sample_perm(batch_size, rng)
    return Draw(case, perm, sample_share(alpha, batch_size if lam_per_sample else None, rng))


def clean_draw(batch_size: int, rng: torch.Generator) -> Draw:
    """Return a draw without randomness: each sample is its own partner."""
    perm = torch.arange(batch_size, device=rng.device)
    return Draw(CLEAN, perm, torch.ones((), device=rng.device, dtype=torch.float32))
