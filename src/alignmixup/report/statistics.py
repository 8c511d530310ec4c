"""Several seeds: mean and deviation, and whether one method is better than another.

Two methods are compared seed by seed: runs of one seed share the order of the images and the draws,
so their difference varies less than either of them. The interval is Student's,

    mean(d) +- t(n - 1) sd(d) / sqrt(n),        d = a - b over the n seeds that both have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The 97.5 % quantile of Student's t by degrees of freedom from 1; beyond the table, the normal's
# with the usual correction.
_T = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912),
    *(2.364624, 2.306004, 2.262157, 2.228139, 2.200985, 2.178813),
)


@dataclass(frozen=True)
class Spread:
    """The values of some seeds: their mean, and their deviation where there are two or more."""

    mean: float
    deviation: float | None


# Differences that vary less than this are equal: accuracies are whole numbers of images.
LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Comparison:
    """The mean difference a - b over shared seeds, with its 95 % interval.

    The interval is infinite where there is none: of one seed, and of seeds that all differ alike,
    which happens by chance among rounded numbers and does not say how much they vary.
    """

    difference: float
    low: float
    high: float
    num_seeds: int

    @property
    def verdict(self) -> str:
        """``"higher"`` or ``"lower"`` where the interval excludes zero, else ``"not shown"``."""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "not shown"

    def interval(self, digits: int = 2) -> str:
        """Return the interval in words."""
        if math.isfinite(self.low):
            return f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"
        return "none (one seed)" if self.num_seeds < 2 else "none (all seeds differ alike)"

    def __str__(self) -> str:
        seeds = "" if self.num_seeds < 2 else f", {self.num_seeds} seeds"
        return f"{self.difference:+.2f} (95 % interval {self.interval()}{seeds})"


def spread(values: Mapping[Any, float]) -> Spread:
    """Summarize the values of some seeds."""
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(statistics.fmean(numbers), deviation)


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison | None:
    """Compare two methods over the seeds that both have; None where they share none.

    With one shared seed, or equal differences, the interval is infinite: nothing can be concluded.
    """
    differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not differences:
        return None
    mean, n = statistics.fmean(differences), len(differences)
    deviation = statistics.stdev(differences) if n > 1 else 0.0
    half = t_quantile(n - 1) * deviation / math.sqrt(n) if deviation > LEAST_DEVIATION else math.inf
    return Comparison(mean, mean - half, mean + half, n)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # The first terms of the expansion of Cornish and Fisher.
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * degrees**4)
    return z + first + second + third + fourth
