"""The command ``bench``: what one training step costs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table
from tyro.conf import Positional

from alignmixup.cli.printing import print_table


@dataclass
class Bench:
    """Time one training step of each method; with its parameters and peak memory."""

    pattern: Positional[str] = "cifar10-r18-*-fast"
    """Pattern of recipe names; images are random, so no data are needed."""
    out: Path | None = None
    """A CSV file to append the rows to."""
    batch_size: int | None = None
    """Images per step; None: that of each recipe."""
    repeats: int = 50
    """How often each case is timed; on a GPU ten steps each."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""

    def __call__(self) -> None:
        from alignmixup.experiments.bench import check_rows
        from alignmixup.recipes.catalog import matching_recipes

        names = matching_recipes(self.pattern)
        changes: dict[str, object] = {"train.device": self.device}
        if self.batch_size is not None:
            changes["train.batch_size"] = self.batch_size
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.out is not None:
            check_rows(self.out)
        table = Table("recipe", "ms/step", "over first", "parameters", "peak MB", "path", box=None)
        try:
            self._measure(names, changes, table)
        finally:  # what has been measured is shown, whatever ended it
            if table.row_count:
                print_table(table)

    def _measure(self, names: list[str], changes: dict[str, object], table: Table) -> None:
        from alignmixup.experiments.bench import bench, write_rows

        first = None
        for name in names:
            print(f"{name} ...", file=sys.stderr)
            say = partial(print, f"{name}:", file=sys.stderr)
            (method,) = bench([name], changes=changes, repeats=self.repeats, say=say)
            first = first or method.mean()
            print(f"{name}: {method.mean():.3f} ms", file=sys.stderr)
            table.add_row(
                method.recipe,
                f"{method.mean():.3f}",
                f"{method.mean() / first:.3f}",
                f"{method.num_parameters / 1e6:.2f} M",
                "" if method.peak_memory_mb is None else f"{method.peak_memory_mb:.0f}",
                method.step_path,
            )
            if self.out is not None:
                write_rows(self.out, [method])
