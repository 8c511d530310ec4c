"""Commands that train: ``demo``, ``recipes``, ``train``, ``sweep``."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table
from tyro.conf import Positional, UseAppendAction

from alignmixup.cli.parsing import PROGRAM, Call, parse_setting
from alignmixup.cli.printing import print_table

__all__ = ["Demo", "Recipes", "Sweep", "Train", "parse_train"]


@dataclass
class Demo:
    """Train three small networks on the built-in data and write a report to look at."""

    out: Path = Path("demo")
    """Folder of the report; an interrupted demo in it is resumed."""
    epochs: int = 12
    """Epochs of each network."""

    def __call__(self) -> None:
        from alignmixup.demo import demo

        page = demo(self.out, epochs=self.epochs)
        print(f"report: {page}")


@dataclass
class Recipes:
    """List every recipe with the published figure it stands beside."""

    pattern: Positional[str] = "*"
    """Part of a name, or a pattern such as 'cifar10-*-fast'."""
    table: str | None = None
    """A table of the paper instead: each of its figures with the commands that measure it."""

    def __call__(self) -> None:
        from alignmixup.recipes.catalogue import find_recipe, published_cell, recipe_names
        from alignmixup.report import paper

        if self.table is not None:
            _print_paper_table(self.table, self.pattern)
            return
        names = recipe_names(self.pattern)
        if not names:
            raise ValueError(f"no recipe matches {self.pattern!r}; 'alignmixup recipes' lists all")
        table = Table("recipe", "epochs", "batch", "mixer", "published top-1 error", box=None)
        for name in names:
            recipe, cell = find_recipe(name), published_cell(name)
            figure = "" if cell is None or cell.value is None else f"{cell.value} ({cell.metric})"
            if cell is not None and cell.top1_error is not None:
                figure = f"{cell.top1_error:.2f}"
            table.add_row(
                name,
                str(recipe.train.epochs),
                str(recipe.train.batch_size),
                type(recipe.mixer).__name__,
                figure,
            )
        print_table(table)
        print("published: in the paper, on its own schedule (not that of -fast)")
        print(f"tables of the paper, for --table: {', '.join(paper.TABLES)}")


def _print_paper_table(name: str, pattern: str) -> None:
    from alignmixup.recipes.catalogue import recipe_names
    from alignmixup.recipes.reproduce import steps_of
    from alignmixup.report import paper

    names = set(recipe_names(pattern))
    table = Table("row", "column", "published", "recipe", "then", box=None)
    for cell in paper.find(table=name):
        steps = steps_of(cell)
        if cell.value is None or steps.recipe not in names:
            continue
        details = [cell.layers, {True: "aligned", False: "unaligned", None: ""}[cell.aligned]]
        column = [cell.data, cell.network, cell.source, paper.METRICS[cell.metric].name]
        if cell.num_iters is not None:
            details.append(f"{cell.num_iters} iterations")
        table.add_row(
            " ".join(word for word in [paper.METHODS[cell.method], *details] if word),
            " ".join(word for word in column if word),
            f"{cell.value:g}",
            steps.recipe,
            " ".join(steps.command),
        )
    if not table.row_count:
        raise ValueError(f"no recipe of table {name!r} matches {pattern!r}")
    print_table(table)
    print(f"{paper.TABLES[name]}: 'alignmixup train RECIPE', then 'alignmixup' and the last column")
    print("(bench needs no trained run; training itself records the accuracy)")


@dataclass
class Train:
    """Train a recipe, or resume the run in the output folder.

    The flags below are those of the recipe named; 'alignmixup recipes' lists the names."""

    recipe: Positional[str]
    """Name of the recipe."""
    out: Path | None = None
    """Folder of the run; None: runs/RECIPE-seedN. A run that is there is resumed."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    dataset: str | None = None
    """Other data for the same recipe, e.g. shapes, or folder:PATH@64 for images of your own."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    logger: UseAppendAction[tuple[str, ...]] = ()
    """Where values go beside the console: tensorboard, trackio, wandb."""
    tensorboard: bool = False
    """The same as --logger tensorboard (pip install 'alignmixup[logging]')."""


def parse_train(args: list[str]) -> Call:
    """The flags of ``train`` are the settings of the recipe it names."""
    from alignmixup.recipes.catalogue import find_recipe

    args = _with_values(args)
    named = bool(args) and not args[0].startswith("-")
    recipe = find_recipe(args[0] if named else "cifar10-r18-alignmixup-fast")
    parts = [(name, getattr(recipe, name)) for name in ("train", "net", "mixer")]
    kind = dataclasses.make_dataclass(
        "Train",
        [
            # The mixers' defaults hold dictionaries, which dataclasses take from a factory alone.
            (name, type(part), dataclasses.field(default_factory=partial(_same, part)))
            for name, part in parts
        ],
        bases=(Train,),
    )
    kind.__doc__ = Train.__doc__
    parsed: Any = tyro.cli(kind, prog=f"{PROGRAM} train", args=args)
    if parsed.recipe != args[0]:  # the flags before it were read as another recipe's
        raise ValueError(f"name the recipe first: {PROGRAM} train {parsed.recipe} ...")
    return lambda: _train(recipe, parsed)


def _same(part: Any) -> Any:
    return part


# Flags that were switches before they could be "auto": --train.compile, --train.no-compile.
SWITCHES = ("compile", "capture", "channels-last")


def _with_values(args: list[str]) -> list[str]:
    """Write the switches of older commands as flags with a value."""
    written: list[str] = []
    for arg, follower in zip(args, [*args[1:], ""], strict=True):
        name = arg.removeprefix("--train.")
        if name.removeprefix("no-") not in SWITCHES or name == arg:
            written.append(arg)
        elif name.startswith("no-"):
            written += [f"--train.{name.removeprefix('no-')}", "False"]
        else:
            written += [arg] if follower in ("True", "False", "auto") else [arg, "True"]
    return written


def _train(recipe: Any, chosen: Any) -> None:
    from alignmixup.experiments.run import train
    from alignmixup.recipes.schema import changed, limited, on_data

    recipe = changed(recipe, _flags(recipe, chosen))
    if chosen.dataset is not None:
        recipe = on_data(recipe, chosen.dataset)
    if chosen.limit is not None:
        recipe = limited(recipe, chosen.limit)
    out = chosen.out or Path("runs") / f"{recipe.name}-seed{recipe.train.seed}"
    loggers = (*chosen.logger, *(["tensorboard"] if chosen.tensorboard else []))
    summary = train(recipe, out, data_root=chosen.data, loggers=loggers)
    if os.environ.get("RANK", "0") == "0":
        print(summary)
        print(f"run: {out}")


def _flags(recipe: Any, chosen: Any) -> dict[str, object]:
    """The settings that flags have changed, by their names."""
    return {
        f"{part}.{setting.name}": value
        for part in ("train", "net", "mixer")
        for setting in dataclasses.fields(getattr(recipe, part))
        if (value := getattr(getattr(chosen, part), setting.name))
        != getattr(getattr(recipe, part), setting.name)
    }


@dataclass
class Sweep:
    """Train several recipes side by side and score them; started again, it resumes.

    alignmixup sweep 'cifar10-r18-*-fast' --workers 3, then alignmixup report runs: a table."""

    patterns: Positional[tuple[str, ...]]
    """Names of recipes, or patterns of names."""
    out: Path = Path("runs")
    """Folder of the runs, each in a folder of its own, its log beside it."""
    seeds: tuple[int, ...] = (0,)
    """One run of each recipe a seed."""
    workers: int = 1
    """How many run at a time."""
    tasks: tuple[str, ...] = ("all",)
    """Evaluations of each finished run; 'all' for everything the data allow."""
    dataset: str | None = None
    """Other data for all of them, e.g. shapes, or folder:PATH@64 for images of your own."""
    set: tuple[str, ...] = ()
    """Settings for all of them, e.g. train.epochs=200 mixer.alpha=1.0."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    minutes: float | None = None
    """After this long the runs are stopped, to be resumed another time."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup.experiments.sweep import recipes_of, sweep

        changes = dict(parse_setting(text, "train.epochs=200") for text in self.set)
        if self.limit is not None:
            changes["data.limit"] = self.limit
        jobs = sweep(
            recipes_of(self.patterns),
            self.out,
            changes=changes,
            dataset=self.dataset,
            seeds=self.seeds,
            tasks=self.tasks,
            data_root=self.data,
            workers=self.workers,
            minutes=self.minutes,
            on_change=lambda job: print(job, flush=True),
        )
        undone = [job for job in jobs if job.state != "done"]
        print(f"{len(jobs) - len(undone)} of {len(jobs)} done in {self.out}")
        if any(job.state.startswith("failed") for job in undone):
            raise RuntimeError("some runs failed; their logs are beside their folders")
