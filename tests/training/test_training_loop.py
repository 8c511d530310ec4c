"""A loop of steps under a clock of its own: when it saves, what it prints, and how it ends."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignmixup.training import Stopped, loop
from alignmixup.training.checkpoint import Checkpoint, read_facts


class Training:
    """Twelve steps that take ``pace`` seconds each; it knows after which of them it was saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pace: float, done: int = 0) -> None:
        self.now, self.pace, self.taken, self.done = 1000.0, pace, 0, done
        self.saved: list[int] = []
        self.lines: dict[int, str] = {}
        self.signals: dict[int, signal.Signals] = {}
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(loop, "time", clock)

    def steps(self) -> Iterator[str]:
        for step in range(self.done + 1, 13):
            self.now += self.pace
            self.taken = step
            if step in self.signals:
                os.kill(os.getpid(), self.signals[step])
            yield self.lines.get(step, "")

    def state(self) -> Checkpoint:
        self.saved.append(self.taken)
        return Checkpoint({"weight": torch.tensor([float(self.taken)])}, {"step": self.taken})

    def run(self, path: Path | None, quiet: bool = True) -> None:
        steps = self.steps()
        loop.run_steps(steps, 12, done=self.done, state=self.state, path=path, quiet=quiet)


def test_it_saves_after_each_line_and_whenever_ten_minutes_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch, pace=250)
    training.lines = {5: "half"}
    training.run(tmp_path / "file.safetensors")
    assert training.saved == [3, 5, 8, 11]  # 750 s after the one before, whatever that was for
    assert read_facts(tmp_path / "file.safetensors")["step"] == 11


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_this_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of an earlier call took an unknown time."""
    training = Training(monkeypatch, pace=7, done=4)
    training.lines = {5: "first", 9: "later", 12: "last"}
    training.run(None, quiet=False)
    assert capsys.readouterr().err.splitlines() == [
        "first  about 49 s left",
        "later  about 21 s left",
        "last  about 0 s left",
    ]


def test_without_a_terminal_a_line_a_minute_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(monkeypatch, pace=25)
    training.run(None, quiet=False)
    assert capsys.readouterr().err.splitlines() == [
        "step 3/12  about 3 min 45 s left",
        "step 6/12  about 2 min 30 s left",
        "step 9/12  about 1 min 15 s left",
        "step 12/12  about 0 s left",
    ]
    Training(monkeypatch, pace=25).run(None)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_counts_the_steps_and_there_are_no_such_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[object] = []

    class Bar(loop.Reporter):
        def __init__(self, total_steps: int, done_steps: int, *, quiet: bool) -> None:
            shown.extend([done_steps, total_steps])
            super().__init__(total_steps, done_steps, quiet=True)

        def advance(self, steps: int = 1) -> None:
            shown.append(steps)

        def say(self, line: str) -> None:
            shown.append(line)

    monkeypatch.setattr(loop, "Reporter", Bar)
    monkeypatch.setattr(loop, "sys", types.SimpleNamespace(stderr=types.SimpleNamespace()))
    loop.sys.stderr.isatty = lambda: True
    Training(monkeypatch, pace=100, done=9).run(None)
    assert shown == [9, 12, 1, 1, 1]


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_ends_it_after_the_step_with_a_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saves: bool,
) -> None:
    training = Training(monkeypatch, pace=1)
    training.signals = {7: signal.SIGTERM}
    with pytest.raises(Stopped, match="the same command resumes") as stop:
        training.run(tmp_path / "file.safetensors" if saves else None)
    assert stop.value.number == signal.SIGTERM
    assert training.taken == 7
    assert training.saved == ([7] if saves else [])
    assert capsys.readouterr().err == ""  # quiet


def test_a_signal_in_the_last_step_is_too_late_to_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch, pace=1)
    training.signals = {12: signal.SIGTERM}
    training.run(tmp_path / "file.safetensors")
    assert training.saved == [12]


def test_an_error_within_a_step_leaves_the_last_checkpoint_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[loop.CheckpointWriter] = []

    class Watched(loop.CheckpointWriter):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            writers.append(self)

    def failing(training: Training) -> Iterator[str]:
        for step in training.steps():
            if training.taken == 4:
                raise OSError("no more images")
            yield step

    monkeypatch.setattr(loop, "CheckpointWriter", Watched)
    training = Training(monkeypatch, pace=1)
    training.lines = {3: "saved"}
    path = tmp_path / "file.safetensors"
    with pytest.raises(OSError, match="no more images"):
        loop.run_steps(failing(training), 12, done=0, state=training.state, path=path, quiet=True)
    assert read_facts(path)["step"] == 3
    (writer,) = writers
    with pytest.raises(RuntimeError, match="shutdown"):
        writer.save(training.state())
