"""What commands have in common on the screen: tables on stdout, progress on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal, or up to 200 characters where there is none.

    Its cells are names of files and classes: brackets and colons in them are no markup.
    """
    width = None if Console().is_terminal else 200
    Console(width=width, markup=False, emoji=False).print(table)


def note_unfinished(run: Path, epoch: int | None, epochs: int) -> None:
    """Say on stderr if a run is not trained to its end."""
    if epoch is not None and epoch < epochs:
        print(f"note: {run} is at epoch {epoch} of {epochs}", file=sys.stderr)


def progress(*columns: ProgressColumn) -> Progress:
    """Return a bar on stderr; elsewhere than on a terminal it prints nothing, not even a line."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


class Watch:
    """Says on stderr which task runs and how far it is: a bar on a terminal, elsewhere lines.

    One that is not shown, as in all processes but rank 0, prints nothing.
    """

    EVERY = 30.0  # seconds between two lines about one task

    def __init__(self, *, is_shown: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._console = Console(stderr=True, quiet=not is_shown)
        self._is_shown = is_shown
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._name = ""
        self._said = 0.0

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:  # elsewhere stopping would print an empty line
            self._bar.stop()

    def task(self, name: str) -> None:
        self._name, self._said = name, time.monotonic()
        for last in self._bar.task_ids:  # one that is left out would seem to run on
            self._bar.remove_task(last)
        self._bar.add_task(name, total=None)
        if self._is_shown and not self._console.is_terminal:
            print(f"{name} ...", file=sys.stderr)

    def images(self, done: int, total: int | None) -> None:
        self._bar.update(self._bar.task_ids[-1], completed=done, total=total)
        is_due = self._is_shown and time.monotonic() - self._said > self.EVERY
        if is_due and not self._console.is_terminal:
            self._said = time.monotonic()
            print(f"{self._name} {done}/{total or '?'} images", file=sys.stderr)
