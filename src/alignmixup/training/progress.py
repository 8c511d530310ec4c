"""What a person sees while training runs: a bar on a terminal, elsewhere one line an epoch."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
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
from rich.text import Text

__all__ = ["Reporter"]


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} steps/s" if speed else "")


class Reporter:
    """Shows how far a run has come; ``quiet`` shows nothing."""

    def __init__(self, total_steps: int, done_steps: int = 0, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar: Progress | None = None
        if sys.stderr.isatty() and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                _Rate(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
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
            self._bar.update(self._task, description=line)
        else:
            self.say(line)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
