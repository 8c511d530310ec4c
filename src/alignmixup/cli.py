"""The command line: parsing and printing, nothing else.

Errors for people are one line; ``--debug`` anywhere shows the whole trace.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from tyro.conf import Positional, UseAppendAction

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
        from alignmixup.recipes.catalogue import find_recipe, published_cell, recipe_names

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
    ood: UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Out-of-distribution images: folder:PATH, lsun-crop, ..., or all, which is without it."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    seed: int = 0
    """Seed of random starts and noise images."""
    device: str = "auto"

    def __call__(self) -> None:
        from alignmixup.recipes.scoring import evaluate

        with _Watch() as watch:
            done = evaluate(
                self.run,
                tasks=self.tasks,
                ood=[name for names in self.ood for name in names] or ["all"],
                data_root=self.data,
                seed=self.seed,
                device=self.device,
                on_task=watch.task,
                on_images=watch.images,
            )
        table = Table("task", "metric", "value", "source", box=None)
        for result in done.results:
            source = str(result.settings.get("source", ""))
            table.add_row(result.task, result.metric, f"{result.value:.3f}", source)
        _print(table)
        for name, why in done.left_out.items():
            print(f"left out {name}: {why}")


class _Watch:
    """Says on stderr which task runs and how far it is: a bar on a terminal, elsewhere lines."""

    EVERY = 30.0  # seconds between two lines about one task

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._console = Console(stderr=True)
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._name = ""
        self._said = 0.0

    def __enter__(self) -> _Watch:
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
        if not self._console.is_terminal:
            print(f"{name} ...", file=sys.stderr)

    def images(self, done: int, total: int | None) -> None:
        self._bar.update(self._bar.task_ids[-1], completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() - self._said > self.EVERY:
            self._said = time.monotonic()
            print(f"{self._name} {done}/{total or '?'} images", file=sys.stderr)


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
    """Draw a figure as PNG and PDF.

    toy: the alignment of 16 points in the plane; methods: one pair of images under every method;
    cards: a picture of each method by itself; correspondences: what is matched with what; effect:
    what alignment changes, layer by layer; interpolations: decoded mixes of features; teaser: four
    methods on one pair; pose: whether pose follows the kept image; heads: what alignment changes
    before pooled and flattened heads; reliability: accuracy by confidence; localization: boxes
    found by class activation maps."""

    name: Positional[str]
    """Name of the figure."""
    run: Path | None = None
    """Folder of a trained run; None: the built-in shapes and a small network, trained or not."""
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
class Decoder:
    """Train a decoder for the frozen network of a finished run, to see what its features hold.

    It is kept in the run's folder and serves 'alignmixup figure interpolations --run RUN' and the
    like; training that was interrupted goes on. A run of AlignMixup/AE has a decoder of its own:
    --kind own says how well it does."""

    run: Positional[Path]
    """Folder of the run."""
    layer: str | None = None
    """Layer whose features are decoded; None: the one the run mixes at."""
    kind: Literal["map", "vector", "own"] = "map"
    """map: of the layer's map; vector: of a fully connected embedding of it, as in the paper."""
    epochs: int = 30
    batch_size: int = 128
    lr: float = 2e-3
    channels: int | None = None
    """Channels of the decoder's first map; None: the layer's, between 64 and 512."""
    seed: int = 0
    again: bool = False
    """Throw away the decoder that is there and start afresh."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    device: str = "auto"

    def __call__(self) -> None:
        from alignmixup.recipes.decoding import DecoderSettings, train_decoder

        settings = DecoderSettings(
            layer=self.layer,
            kind=self.kind,
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            channels=self.channels,
            seed=self.seed,
        )
        print(
            train_decoder(
                self.run, settings, data_root=self.data, device=self.device, again=self.again
            )
        )


@dataclass
class Adain:
    """Train the style network that StyleMix and StyleCutMix need, on any image set.

    Then train with --mixer.weights FILE, and --mixer.sha256 to be sure of it. Those recipes make
    one of their own where none is named; this one serves many runs, and has the classes' distances
    in style that the automatic gamma of StyleCutMix asks for."""

    dataset: Positional[str]
    """Data set by name, or folder:PATH@SIZE; its training images."""
    out: Path
    """The .safetensors file to write."""
    weights: str = ""
    """Do not train: take these (a folder of vgg_normalised and decoder, or a file of ours) and add
    the class distances of the data set."""
    steps: int = 4000
    images: int = 10_000
    """How many images at most."""
    width: int = 32
    """Channels of the first layer."""
    seed: int = 0
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    device: str = "auto"

    def __call__(self) -> None:
        from alignmixup.recipes.styling import make_style_weights

        columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("steps", total=None)
            made = make_style_weights(
                self.dataset,
                self.out,
                weights=self.weights,
                steps=self.steps,
                num_images=self.images,
                width=self.width,
                seed=self.seed,
                data_root=self.data,
                device=self.device,
                on_step=lambda done, total: bar.update(task, completed=done, total=total),
            )
        print(made)


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
    "decoder": Decoder,
    "adain": Adain,
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
  figure NAME [--run DIR]    draw toy, methods, cards, correspondences, effect, interpolations,
                             teaser, pose, heads, reliability or localization
  decoder RUN [--layer ..]   train a decoder for a finished run, to see what its features hold
  adain DATASET --out FILE   train the style network of StyleMix and StyleCutMix
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
