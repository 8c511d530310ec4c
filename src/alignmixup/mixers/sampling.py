"""The chance every mixer needs: a case, a partner for each sample, a share for each pair.

All of it comes from one explicit ``torch.Generator``. Draws happen on the generator's device; a CPU
generator gives the same draws whatever device the images are on, and never waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from alignmixup.contracts import Draw

__all__ = [
    "check_prob",
    "check_weights",
    "probabilities",
    "sample_case",
    "sample_pairs",
    "sample_perm",
    "sample_share",
    "sample_unit",
    "some_of_the_time",
]


def probabilities(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the cases that can occur, with their probabilities."""
    total = sum(weights.values())
    return {case: weight / total for case, weight in weights.items() if weight > 0}


def check_prob(prob: float) -> None:
    if not 0 <= prob <= 1:
        raise ValueError(f"prob must lie in [0, 1], got {prob}")


def some_of_the_time(case: str, prob: float) -> dict[str, float]:
    """The cases of a method that mixes with this probability and else leaves images clean."""
    return probabilities({case: prob, "clean": 1 - prob})


def sample_pairs(
    weights: Mapping[str, float],
    alpha: float,
    lam_per_sample: bool,
    batch_size: int,
    rng: torch.Generator,
) -> Draw:
    """Draw a case, a partner for each sample, and one share for the batch or one a sample."""
    case = sample_case(weights, rng)
    perm = sample_perm(batch_size, rng)
    return Draw(case, perm, sample_share(alpha, batch_size if lam_per_sample else None, rng))


def sample_case(weights: Mapping[str, float], rng: torch.Generator) -> str:
    """Draw one case; ``weights`` need not sum to one."""
    total = sum(weights.values())
    point = float(torch.rand((), generator=rng, device=rng.device, dtype=torch.float64)) * total
    for case, weight in weights.items():
        point -= weight
        if point < 0:
            return case
    return [case for case, weight in weights.items() if weight > 0][-1]  # rounding left a rest


def sample_perm(batch_size: int, rng: torch.Generator) -> Tensor:
    """Draw a partner for each sample: a permutation of the batch."""
    return torch.randperm(batch_size, generator=rng, device=rng.device)


def sample_share(alpha: float, size: int | None, rng: torch.Generator) -> Tensor:
    """Draw anchor shares from Beta(alpha, alpha): one for the batch, or ``size`` of them."""
    shape = (2,) if size is None else (2, size)
    # Two gammas make a beta; torch.distributions.Beta takes no generator, hence the private op.
    # In float64, because a gamma of small alpha underflows float32 and 0 / 0 is no share.
    concentration = torch.full(shape, alpha, dtype=torch.float64, device=rng.device)
    g = torch._standard_gamma(concentration, generator=rng)
    return (g[0] / g.sum(0)).float()


def sample_unit(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw uniformly from [0, 1): positions as fractions of an image not yet seen."""
    return torch.rand(shape, generator=rng, device=rng.device)


def check_weights(weights: Mapping[str, float], known: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` for an unknown case or weights that cannot be drawn from."""
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise ValueError(f"unknown cases {unknown}; choose from {list(known)}")
    if any(w < 0 for w in weights.values()) or not 0 < sum(weights.values()) < math.inf:
        raise ValueError(f"case weights must be >= 0, finite and not all zero, got {dict(weights)}")
