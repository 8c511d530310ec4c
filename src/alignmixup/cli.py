"""The command line: parsing and printing, nothing else.

Errors for people are one line; ``--debug`` anywhere shows the whole trace.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from tyro.conf import Positional

__all__ = ["main"]

PROGRAM = "alignmixup"


@dataclass
class Demo:
    """Train three small networks on the built-in data and write a report to look at."""

    out: Path = Path("demo")
    """Folder of the report; an interrupted demo in it goes on."""
    epochs: int = 12
    """Epochs of each network."""

    def __call__(self) -> None:
        from alignmixup.recipes.demo import demo

        page = demo(self.out, epochs=self.epochs)
        print(f"report: {page}")


@dataclass
class Recipes:
    """List every recipe with the published figure it stands beside."""

    pattern: Positional[str] = "*"
    """Part of a name, or a pattern such as 'cifar10-*-fast'."""

    def __call__(self) -> None:
        from alignmixup.recipes.catalogue import find_recipe, published_error, recipe_names

        names = recipe_names(self.pattern)
        if not names:
            raise ValueError(f"no recipe matches {self.pattern!r}; 'alignmixup recipes' lists all")
        table = Table("recipe", "epochs", "batch", "mixer", "published top-1 error", box=None)
        for name in names:
            recipe, error = find_recipe(name), published_error(name)
            table.add_row(
                name,
                str(recipe.train.epochs),
                str(recipe.train.batch_size),
                type(recipe.mixer).__name__,
                "" if error is None else f"{error:.2f}",
            )
        _print(table)
        print("published: the paper's best test epoch on its own schedule (not that of -fast)")


@dataclass
class Train:
    """Train a recipe, or go on with the run in the output folder.

    The flags below are those of the recipe named; 'alignmixup recipes' lists the names."""

    recipe: Positional[str]
    """Name of the recipe."""
    out: Path | None = None
    """Folder of the run; None: runs/RECIPE-seedN. A run that is there goes on."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    dataset: str | None = None
    """Other data for the same recipe, e.g. shapes, or folder:PATH@64 for images of your own."""
    tensorboard: bool = False
    """Write TensorBoard files as well (pip install 'alignmixup[logging]')."""


@dataclass
class Evaluate:
    """Score a trained run and append the figures to its results.jsonl."""

    run: Positional[Path]
    """Folder of the run."""
    tasks: tuple[str, ...] = ("accuracy",)
    """Which evaluations; 'all' for everything the data allow."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    seed: int = 0
    """Seed of random starts and noise images."""
    device: str = "auto"

    def __call__(self) -> None:
        from alignmixup.recipes.scoring import evaluate

        done = evaluate(
            self.run,
            tasks=self.tasks,
            data_root=self.data,
            seed=self.seed,
            device=self.device,
            on_task=lambda name: print(f"{name} ...", file=sys.stderr),
        )
        table = Table("task", "metric", "value", "source", box=None)
        for result in done.results:
            source = str(result.settings.get("source", ""))
            table.add_row(result.task, result.metric, f"{result.value:.3f}", source)
        _print(table)
        for name, why in done.left_out.items():
            print(f"left out {name}: {why}")


@dataclass
class Report:
    """Fold the results of runs into the paper's tables, ours beside the published figure."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or files of result lines."""
    out: Path | None = None
    """Folder for tables.md, tables.tex and tables.html; None: print them."""
    accuracy: Literal["median10", "last", "best"] = "median10"
    """Which accuracy: the median of the last ten epochs, the last, or the best test epoch."""

    def __call__(self) -> None:
        from alignmixup.report.page import write_tables
        from alignmixup.report.render import to_rich
        from alignmixup.report.tables import kinds_in, read_results, table

        results = read_results(self.runs)
        tables = [table(results, kind, which=self.accuracy) for kind in kinds_in(results)]
        if self.out is None:
            for each in tables:
                _print(to_rich(each))
            return
        for path in write_tables(tables, self.out):
            print(path)


@dataclass
class Figure:
    """Draw a figure as PNG and PDF: toy, methods, correspondences or effect.

    toy: the alignment of 16 points in the plane; methods: one pair of images under every method;
    correspondences: what is matched with what; effect: what alignment changes, layer by layer."""

    name: Positional[str]
    """Name of the figure."""
    run: Path | None = None
    """Folder of a trained run; None: the built-in shapes and an untrained network."""
    out: Path = Path("figures")
    """Folder of the pictures."""
    seed: int = 0
    """Seed of points, pairs of images, untrained weights and the methods' chance."""
    data: Path | None = None
    """Folder of the data sets of the run; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup.recipes.figures import draw_figure

        written = draw_figure(
            self.name, self.out, run=self.run, seed=self.seed, data_root=self.data
        )
        for path in written:
            print(path)


@dataclass
class DataList:
    """List the data sets."""

    def __call__(self) -> None:
        from alignmixup import data

        table = Table("name", "classes", "size", "what", box=None)
        for name in data.names():
            if name.startswith("folder:"):
                table.add_row(name, "", "", "any folder of train/CLASS and val/CLASS images")
                continue
            source = data.find(name)
            table.add_row(name, str(source.num_classes), str(source.image_size), source.description)
        _print(table)


@dataclass
class DataCheck:
    """Say what of a data set is missing or damaged."""

    name: Positional[str]
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""

    def __call__(self) -> None:
        from alignmixup import data

        problems = data.check(self.name, self.data)
        if problems:
            raise ValueError(f"{self.name}: " + "\n".join(problems))
        print(f"{self.name}: complete")


@dataclass
class DataFetch:
    """Download a data set, check it and unpack it; an interrupted download goes on."""

    name: Positional[str]
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    url: str | None = None
    """A mirror; the checksum stays that of the official file."""

    def __call__(self) -> None:
        from alignmixup import data

        columns = (TextColumn(self.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(self.name, total=None)
            folder = data.fetch(
                self.name,
                self.data,
                lambda done, total: bar.update(task, completed=done, total=total),
                url=self.url,
            )
        print(folder)


@dataclass
class Bench:
    """Time one training step of each method: ms, parameters, peak memory (the paper's Table 2)."""

    pattern: Positional[str] = "cifar10-r18-*-fast"
    """Which recipes; images are made up, so no data are needed."""
    out: Path | None = None
    """A CSV file to append the rows to."""
    batch_size: int | None = None
    device: str = "auto"

    def __call__(self) -> None:
        from alignmixup.recipes.bench import bench, write_rows
        from alignmixup.recipes.catalogue import recipe_names

        names = recipe_names(self.pattern)
        if not names:
            raise ValueError(f"no recipe matches {self.pattern!r}; 'alignmixup recipes' lists all")
        changes: dict[str, object] = {"train.device": self.device}
        if self.batch_size is not None:
            changes["train.batch_size"] = self.batch_size
        table = Table("recipe", "ms/step", "over first", "parameters", "peak MB", "path", box=None)
        first = None
        for method in bench(names, changes=changes):
            first = first or method.mean()
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
        _print(table)


COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "recipes": Recipes,
    "evaluate": Evaluate,
    "report": Report,
    "figure": Figure,
    "bench": Bench,
}
DATA_COMMANDS: dict[str, Any] = {"list": DataList, "check": DataCheck, "fetch": DataFetch}

USAGE = """\
usage: alignmixup COMMAND ...

  demo                       train small networks on built-in data, write a report to look at
  recipes [PATTERN]          every row of the tables by name, with the published figure
  train RECIPE [--out DIR]   train a recipe, or go on with the run in DIR
  evaluate RUN [--tasks ..]  score a trained run
  report RUN... [--out DIR]  tables of results, ours beside the published figures
  figure NAME [--run DIR]    draw toy, methods, correspondences or effect
  data list|check|fetch      the data sets
  bench [PATTERN]            time one training step of each method

alignmixup COMMAND --help describes each; --debug anywhere shows the trace of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    try:
        _parse(args)()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if is_debug:
            raise
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(args: list[str]) -> Callable[[], None]:
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    if command in ("--help", "-h"):
        return lambda: print(USAGE, end="")
    if command == "--version":
        return _version
    if command == "train":
        return _parse_train(rest)
    if command == "data":
        if not rest or rest[0] in ("--help", "-h"):
            return lambda: print("usage: alignmixup data list | check NAME | fetch NAME")
        if rest[0] not in DATA_COMMANDS:
            raise ValueError(f"unknown data command {rest[0]!r}; there are {list(DATA_COMMANDS)}")
        return _call(DATA_COMMANDS[rest[0]], f"{PROGRAM} data {rest[0]}", rest[1:])
    if command not in COMMANDS:
        raise ValueError(
            f"unknown command {command!r}; there are {[*COMMANDS, 'train', 'data']}, see --help"
        )
    return _call(COMMANDS[command], f"{PROGRAM} {command}", rest)


def _call(kind: Any, program: str, args: list[str]) -> Callable[[], None]:
    parsed: Callable[[], None] = tyro.cli(kind, prog=program, args=args)
    return parsed


def _parse_train(args: list[str]) -> Callable[[], None]:
    """The flags of ``train`` are the settings of the recipe it names."""
    from alignmixup.recipes.catalogue import find_recipe

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
    return lambda: _train(recipe, parsed)


def _same(part: Any) -> Any:
    return part


def _train(recipe: Any, chosen: Any) -> None:
    from alignmixup.recipes.run import train

    data = recipe.data
    name = recipe.name
    if chosen.dataset is not None:
        # The name says which data a figure is for: it must not say the recipe's own.
        rest = name.removeprefix(f"{data.name}-")
        name = f"{re.sub('[^A-Za-z0-9]+', '_', chosen.dataset)}-{rest}"
        data = dataclasses.replace(data, name=chosen.dataset)
    recipe = dataclasses.replace(
        recipe, name=name, data=data, net=chosen.net, mixer=chosen.mixer, train=chosen.train
    )
    out = chosen.out or Path("runs") / f"{name}-seed{recipe.train.seed}"
    summary = train(recipe, out, data_root=chosen.data, tensorboard=chosen.tensorboard)
    print(summary)
    print(f"run: {out}")


def _version() -> None:
    from importlib.metadata import version

    print(version("alignmixup"))


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a pipe has no width to fit into
        console = Console(width=200)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
