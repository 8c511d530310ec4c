"""How long a run will take, measured once and printed in two units."""

import pytest

from alignmixup.training.progress import Estimate, duration


def test_the_estimate_leaves_the_first_steps_out_and_waits_for_the_device(monkeypatch):
    clock = iter([100.0, 103.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    waits = []
    estimate = Estimate(skipped=2, measured=3, wait=lambda: waits.append(1))
    said = [estimate.step(remaining) for remaining in range(99, 89, -1)]
    assert [bool(text) for text in said] == [False] * 4 + [True] + [False] * 5
    assert said[4].startswith("about 1 min 35 s to go: 95 steps of 1e+03 ms")
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3_725, "1 h 2 min"),
        (100_000, "27 h 46 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_has_two_units(seconds, text):
    assert duration(seconds) == text
