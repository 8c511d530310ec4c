"""Progress of training: a bar on a terminal, elsewhere one line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text


class _Bar(Progress):
    """A bar with a line of text above it, so that neither is cut."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.line:
            yield Text(self.line, no_wrap=True, overflow="ellipsis")
        yield from super().get_renderables()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} steps/s" if speed else "")


class Estimate:
    """The time that the remaining steps will take, measured once, after the first ones.

    The first ``skipped`` steps are not measured: they compile, capture and fill caches. ``wait``
    waits for a device that is behind the host; it is called twice in a run.
    """

    def __init__(self, skipped: int, measured: int, wait: Callable[[], None]) -> None:
        self._skipped, self._measured, self._wait = skipped, measured, wait
        self._taken = 0
        self._begin = 0.0

    def step(self, remaining: int) -> str:
        """Count a step; return the estimate once it is known, otherwise an empty string."""
        self._taken += 1
        if self._taken == self._skipped:
            self._wait()
            self._begin = time.perf_counter()
        if self._taken != self._skipped + self._measured or not remaining:
            return ""
        self._wait()
        pace = (time.perf_counter() - self._begin) / self._measured
        return (
            f"about {duration(pace * remaining)} to go: {remaining} steps of {1e3 * pace:.3g} ms, "
            "evaluation not counted"
        )


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole_seconds} s" if minutes else f"{whole_seconds} s"


class Reporter:
    """Shows the progress of a run; ``quiet`` shows nothing."""

    def __init__(self, total_steps: int, done_steps: int = 0, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar: _Bar | None = None
        if sys.stderr.isatty() and not quiet:
            whole = Column(no_wrap=True)
            self._bar = _Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(table_column=whole),
                _Rate(table_column=whole),
                TimeElapsedColumn(table_column=whole),
                TextColumn("left:"),
                TimeRemainingColumn(table_column=whole),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=done_steps)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, steps: int = 1) -> None:
        if self._bar:
            self._bar.advance(self._task, steps)

    def epoch(self, line: str) -> None:
        if self._bar:
            self._bar.line = line
        else:
            self.say(line)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
