"""Means, deviations and paired intervals, held to scipy; a claim needs an interval."""

import math
import random
import statistics

import pytest
from scipy import stats

from alignmixup.report.statistics import compare, spread, t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 12, 13, 20, 50, 1000])
def test_quantiles_are_those_of_student(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-6)


def test_a_paired_interval_is_that_of_scipy():
    rng = random.Random(3)
    a = {seed: rng.gauss(80, 1) for seed in range(6)}
    b = {seed: rng.gauss(79, 1) for seed in range(1, 9)}
    shared = sorted(a.keys() & b.keys())
    expected = stats.ttest_rel([a[s] for s in shared], [b[s] for s in shared])
    interval = expected.confidence_interval(0.95)
    found = compare(a, b)
    assert found.num_seeds == 5
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-3)
    assert compare(b, a).difference == pytest.approx(-found.difference)


def test_a_claim_is_made_only_where_the_interval_excludes_zero():
    steady = {0: 1.0, 1: 1.1, 2: 0.9}
    zero = dict.fromkeys(steady, 0.0)
    assert compare(steady, zero).verdict == "higher"
    assert compare(zero, steady).verdict == "lower"
    assert compare({0: 1.0, 1: -1.0, 2: 0.9}, zero).verdict == "not shown"


@pytest.mark.parametrize("step", [0.0, 0.5, 0.01])
def test_seeds_that_all_differ_alike_show_nothing(step):
    """Rounded accuracies often do: the interval had no width, and excluded zero."""
    a = {seed: 78.01 + 0.1 * seed for seed in range(3)}
    found = compare({seed: value + step for seed, value in a.items()}, a)
    assert (found.verdict, found.low, found.high) == ("not shown", -math.inf, math.inf)
    assert str(found) == f"+{step:.2f} (95 % interval none (all seeds differ alike), 3 seeds)"


def test_one_seed_shows_nothing():
    found = compare({0: 99.0}, {0: 1.0, 1: 1.0})
    assert (found.verdict, found.low, found.high) == ("not shown", -math.inf, math.inf)
    assert str(found) == "+98.00 (95 % interval none (one seed))"
    assert spread({0: 3.0}).deviation is None
    assert compare({0: 1.0}, {1: 1.0}) is None


def test_spread_is_the_sample_deviation():
    found = spread({0: 1.0, 1: 2.0, 2: 6.0})
    assert found.mean == 3.0
    assert found.deviation == pytest.approx(statistics.stdev([1.0, 2.0, 6.0]))
