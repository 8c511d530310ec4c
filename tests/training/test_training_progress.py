"""How long a run will take, measured once and printed in two units."""

import io
import sys
from functools import partial

import pytest
from rich.console import Console

from alignmixup.training import progress
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
        (59.7, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3_599.7, "1 h 0 min"),
        (60, "1 min 0 s"),
        (61, "1 min 1 s"),
        (3_600, "1 h 0 min"),
        (172_800, "2 d 0 h"),
        (3_725, "1 h 2 min"),
        (100_000, "27 h 46 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_has_two_units(seconds, text):
    assert duration(seconds) == text


def test_the_line_of_an_epoch_leaves_the_bar_its_room(monkeypatch):
    shown = io.StringIO()
    made = partial(Console, file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **of: made())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = "epoch 199/2,000  loss 0.9502 (mixed)  test top-1 95.00 %  0.4 s"
    with progress.Reporter(781_250) as reporter:
        reporter.advance(156_250)
        reporter.epoch(line)
    text = shown.getvalue()
    assert line in text
    assert any("156250/781250" in each and "left:" in each for each in text.splitlines())
    assert "\u2026" not in text  # an ellipsis
