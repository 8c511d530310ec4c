"""Commands that train: ``demo``, ``recipes``, ``train``, ``sweep``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.table import Table
from tyro.conf import Positional, UseAppendAction

from alignmixup.cli.parsing import PROGRAM, Call, parse_setting, take_settings, typed_settings
from alignmixup.cli.printing import print_table

if TYPE_CHECKING:
    from alignmixup.recipes.schema import Recipe


@dataclass
class Demo:
    """Train three small networks on few built-in images and write a page of what mixing changed.

    On two cores it takes about a minute and a half. Ctrl-C writes a page of what is finished."""

    out: Path = Path("demo")
    """Folder of the page, report.html, and of the runs; an interrupted demo in it is resumed."""
    epochs: int = 12
    """Epochs of each network."""
    seed: int = 0
    """Seed of weights, order and mixing."""

    def __call__(self) -> None:
        from alignmixup.demo import demo
        from alignmixup.demo.setup import Size

        page = demo(self.out, Size(epochs=self.epochs, seed=self.seed))
        print(f"open in a browser: {page.resolve().as_uri()}")


@dataclass
class Recipes:
    """List every recipe with the published figure it stands beside."""

    pattern: Positional[str] = "*"
    """Part of a name, or a pattern such as 'cifar10-*-fast'."""
    table: str | None = None
    """A table of the paper instead: each of its figures with the commands that measure it."""

    def __call__(self) -> None:
        from alignmixup.recipes.catalog import find_recipe, recipe_names
        from alignmixup.report import paper

        if self.table is not None:
            _print_paper_table(self.table, self.pattern)
            return
        names = recipe_names(self.pattern)
        if not names:
            raise ValueError(f"no recipe matches {self.pattern!r}; 'alignmixup recipes' lists all")
        table = Table("recipe", "epochs", "batch", "mixer", "published top-1 error", box=None)
        for name in names:
            recipe = find_recipe(name)
            cell, located = (paper.cell_beside(recipe.key, m) for m in ("top1_error", "top1_loc"))
            figure = "" if located is None else f"{located.value} ({located.metric})"
            if cell is not None:
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
    from alignmixup.recipes.catalog import recipe_names
    from alignmixup.report import paper
    from alignmixup.report.reproduce import steps_of

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

    Every setting of a recipe is a flag: --train.epochs 300, --net.width 32, --mixer.alpha 1.0,
    --data.limit 500. 'alignmixup train RECIPE --help' lists those of a recipe, 'alignmixup recipes'
    the recipes."""

    recipe: Positional[str]
    """Name of the recipe, or FILE.py:FUNCTION, a function of yours that returns a Recipe."""
    out: Path | None = None
    """Folder of the run; None: runs/RECIPE-seedN. A run that is there is resumed."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    dataset: str | None = None
    """Other data for the same recipe, e.g. shapes, or folder:PATH@64 for images of your own."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    init_from: Path | None = None
    """Folder of a run whose weights to start from; a head for other classes is drawn anew."""
    extend: bool = False
    """Train the finished run in --out for more epochs: --train.epochs is its new length."""
    logger: UseAppendAction[tuple[str, ...]] = ()
    """Where values go beside the console: tensorboard, trackio, wandb."""
    tensorboard: bool = False
    """The same as --logger tensorboard (pip install 'alignmixup[logging]')."""

    def changed(self, settings: Mapping[str, Sequence[str]]) -> Recipe:
        """Return the recipe with these settings, on the data that were named."""
        from alignmixup.experiments.plugins import open_recipe
        from alignmixup.recipes.schema import changed, limited, on_data

        recipe = open_recipe(self.recipe)
        recipe = changed(recipe, typed_settings(settings, [recipe]))
        if self.dataset is not None:
            recipe = on_data(recipe, self.dataset)
        return recipe if self.limit is None else limited(recipe, self.limit)

    def run(self, recipe: Recipe) -> None:
        """Train the recipe and print its accuracies."""
        from alignmixup.experiments.run import train

        out = self.out or Path("runs") / f"{recipe.name}-seed{recipe.train.seed}"
        run = train(
            recipe,
            out,
            data_root=self.data,
            init_from=self.init_from,
            extend=self.extend,
            loggers=(*self.logger, *(["tensorboard"] if self.tensorboard else [])),
        )
        if os.environ.get("RANK", "0") == "0":
            print(run.summary)
            print(f"run: {out}")


def parse_train(args: list[str]) -> Call:
    """Read the words after ``train``; the settings among them are those of the recipe named."""
    words, settings = take_settings(args)
    is_named = bool(words) and not words[0].startswith("-")
    if is_named and not {"-h", "--help"}.isdisjoint(words):
        return _help_of(words[0])
    train = tyro.cli(Train, prog=f"{PROGRAM} train", args=words)
    if not is_named:
        raise ValueError(f"name the recipe first: {PROGRAM} train {train.recipe} ...")
    recipe = train.changed(settings)
    return lambda: train.run(recipe)


def _help_of(name: str) -> Call:
    """Print the help of ``train`` with the settings of this recipe, and exit."""
    from alignmixup.experiments.plugins import open_recipe

    recipe = open_recipe(name)
    parts = [(part, getattr(recipe, part)) for part in ("train", "net", "mixer")]
    kind = dataclasses.make_dataclass(
        "Train",
        [
            # The mixers' defaults hold dictionaries, which dataclasses take from a factory alone.
            (part, type(value), dataclasses.field(default_factory=partial(_same, value)))
            for part, value in parts
        ],
        bases=(Train,),
    )
    about = f"Train {recipe.name}, or resume the run of it in the output folder."
    tyro.cli(kind, prog=f"{PROGRAM} train", args=["--help"], description=about)
    raise AssertionError("--help exits")


def _same(part: Any) -> Any:
    return part


@dataclass
class Sweep:
    """Train several recipes side by side and score them; started again, it resumes.

    alignmixup sweep 'cifar10-r18-*-fast' --workers 3, then alignmixup report runs: a table.
    Settings for all of them are flags as in 'train': --train.epochs 200 --mixer.alpha 1.0."""

    patterns: Positional[tuple[str, ...]]
    """Names of recipes, patterns of names, or FILE.py:FUNCTION."""
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
    """The same settings, written train.epochs=200 mixer.alpha=1.0."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    minutes: float | None = None
    """After this long the runs are stopped, to be resumed another time."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self, settings: Mapping[str, Sequence[str]] | None = None) -> None:
        """Train and score them, with ``settings`` for all."""
        from alignmixup.experiments.plugins import open_recipe
        from alignmixup.experiments.sweep import recipes_of, sweep

        names = recipes_of(self.patterns)
        changes = dict(parse_setting(text, "train.epochs=200") for text in self.set)
        changes |= typed_settings(settings or {}, [open_recipe(name) for name in names])
        if self.limit is not None:
            changes["data.limit"] = self.limit
        jobs = sweep(
            names,
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


def parse_sweep(args: list[str]) -> Call:
    """Read the words after ``sweep``, settings of recipes among them."""
    words, settings = take_settings(args)
    return partial(tyro.cli(Sweep, prog=f"{PROGRAM} sweep", args=words), settings)
