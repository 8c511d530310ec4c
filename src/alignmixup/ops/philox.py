"""Random numbers as arithmetic: Philox4x32-10 (Salmon et al. 2011) and gammas made of it.

A seed and a counter give four words of 32 bits, on every device the same ones. A step that needs
more random numbers than the host can draw in time gets one seed instead, and makes the rest as part
of its own computation, in fixed shapes and without waiting for the host.

    g ~ Gamma(alpha):   g = d v u^(1/alpha),   d = alpha + 2/3,   v = (1 + x / sqrt(9 d))^3

x is the first of four normal proposals that Marsaglia and Tsang (2000) accept for Gamma(alpha + 1);
fewer than one in 10^5 has none among four, and takes v = 1.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignmixup.contracts import fusible

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(seed: Int[Tensor, ""], index: Int[Tensor, "*shape"], stream: int = 0) -> Words:
    """Return four random words, int64 in [0, 2^32), for each ``index`` in [0, 2^32).

    The counter is (index, stream, 0, 0), the key the two halves of ``seed``.
    """
    keys = [seed & MASK, (seed >> 32) & MASK]
    zero = torch.zeros_like(index)
    c0, c1, c2, c3 = index, zero + stream, zero, zero
    for _ in range(NUM_ROUNDS):
        high0, low0 = _product(MULTIPLIERS[0], c0)
        high1, low1 = _product(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + step) & MASK for key, step in zip(keys, INCREMENTS, strict=True)]
    return c0, c1, c2, c3


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product; by halves, which do not overflow an int64."""
    high, low = factor * (word >> 16), factor * (word & 0xFFFF)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK


def _unit(word: Tensor) -> Tensor:
    """A word as a float32 in (0, 1): the middles of 2^24 equal parts."""
    return ((word >> 8).float() + 0.5) * 2.0**-24


def _normals(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two normal numbers of two words (Box and Muller)."""
    radius, angle = (-2 * _unit(first).log()).sqrt(), 2 * math.pi * _unit(second)
    return radius * angle.cos(), radius * angle.sin()


@fusible
def gammas(
    seed: Int[Tensor, ""], alpha: Float[Tensor, ""], shape: tuple[int, ...]
) -> Float[Tensor, "..."]:
    """Draw from Gamma(alpha, 1) in float32; with an alpha below 0.1 some are too small for it."""
    return log_gammas(seed, alpha, shape).exp()


def log_gammas(
    seed: Int[Tensor, ""], alpha: Float[Tensor, ""], shape: tuple[int, ...]
) -> Float[Tensor, "..."]:
    """Draw logarithms of gammas, which are finite for every alpha."""
    index = torch.arange(math.prod(shape), device=seed.device).view(shape)
    a, b, u = (philox(seed, index, stream) for stream in range(3))
    boost = _unit(a[0])
    alpha = alpha.float().clamp(min=1e-30)
    d = alpha + 2 / 3
    scale = (9 * d).rsqrt()
    value, is_found = torch.ones_like(boost), torch.zeros_like(boost, dtype=torch.bool)
    for x, word in zip((*_normals(a[1], a[2]), *_normals(b[0], b[1])), u, strict=True):
        v = (1 + scale * x) ** 3
        limit = 0.5 * x * x + d - d * v + d * v.clamp(min=1e-30).log()
        accepted = (v > 0) & (_unit(word).log() < limit) & ~is_found
        value, is_found = torch.where(accepted, v, value), is_found | accepted
    return d.log() + value.log() + boost.log() / alpha


@fusible
def dirichlet(
    seed: Int[Tensor, ""], alpha: Float[Tensor, ""], shape: tuple[int, ...], dim: int
) -> Float[Tensor, "..."]:
    """Draw weights that sum to 1 over ``dim``, from a symmetric Dirichlet distribution."""
    # Of logarithms: with a small alpha all gammas of a sum may be zero in float32.
    return log_gammas(seed, alpha, shape).softmax(dim)
