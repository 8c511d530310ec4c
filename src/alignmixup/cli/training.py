"""Commands that train: ``demo``, ``train``, ``sweep``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from tyro.conf import Positional, PositionalMetavarFromFieldName, UseAppendAction

from alignmixup.cli.parsing import (
    PROGRAM,
    Call,
    parse_setting,
    read_words,
    take_settings,
    typed_settings,
)

if TYPE_CHECKING:
    from alignmixup.recipes.schema import Recipe

UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run the same command again


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
class Train:
    """Train a recipe, or resume the run in the output folder.

    Every setting of a recipe is a flag: --train.epochs 300, --net.width 32,
    --mixer.alpha 1.0, --data.limit 500. 'alignmixup train RECIPE --help' lists
    those of a recipe, 'alignmixup recipes' the recipes. Ctrl-C saves and exits;
    the same command resumes."""

    recipe: Positional[str]
    """Name of the recipe, or FILE.py:FUNCTION, a function of yours that returns a Recipe."""
    out: Path | None = None
    """Folder of the run; None: runs/RECIPE-seedN. A run in it is resumed."""
    data: Path | None = None
    """Folder of the data sets; else ALIGNMIXUP_DATA, else ./datasets."""
    dataset: str | None = None
    """Other data for the same recipe, e.g. shapes, or folder:PATH@64 for images of your own."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    init_from: Path | None = None
    """Folder of a run whose weights to start from; a head for other classes is re-initialized."""
    extend: bool = False
    """Train the finished run in --out for more epochs: --train.epochs is its new length."""
    logger: UseAppendAction[tuple[str, ...]] = ()
    """Logger to use beside the console: tensorboard, trackio, wandb."""
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

        out = self.out or Path("runs") / recipe.folder
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
    train = read_words(Train, "train", words, settings=lambda: _settings_of(words[:1]))
    if not is_named:
        raise ValueError(f"name the recipe first: {PROGRAM} train {train.recipe} ...")
    recipe = train.changed(settings)
    return lambda: train.run(recipe)


def _settings_of(patterns: Sequence[str]) -> list[str]:
    """List the settings of the recipes named, as flags have them; of none where none is found."""
    from alignmixup.recipes.catalog import find_recipe, recipe_names

    found = {
        f"{part}.{field.name}"
        for name in {name for pattern in patterns for name in recipe_names(pattern)[:1]}
        for part in ("train", "net", "mixer", "data")
        for field in dataclasses.fields(getattr(find_recipe(name), part))
    }
    return sorted(found)


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
    config = (PositionalMetavarFromFieldName,)
    tyro.cli(kind, prog=f"{PROGRAM} train", args=["--help"], description=about, config=config)
    raise AssertionError("--help exits")


def _same(part: Any) -> Any:
    return part


@dataclass
class Sweep:
    """Train several recipes at a time and evaluate them; the same command resumes.

    Settings for all of them are flags as in 'train': --train.epochs 200
    --mixer.alpha 1.0. 'alignmixup report' makes a table of the runs.

    The exit status is 0 if all runs are done, 75 if some are left for the same
    command, as after --minutes, and 1 if some failed or are in use."""

    patterns: Positional[tuple[str, ...]]
    """Names of recipes, patterns of names, or FILE.py:FUNCTION."""
    out: Path = Path("runs")
    """Folder of the runs, each in a folder of its own, its log beside it."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; each recipe is trained once per seed."""
    workers: int = 1
    """Number of runs at a time."""
    tasks: tuple[str, ...] = ("all",)
    """Evaluations of each finished run; 'all' for everything the data allow."""
    dataset: str | None = None
    """Other data for all of them, e.g. shapes, or folder:PATH@64 for images of your own."""
    set: tuple[str, ...] = ()
    """Settings for all recipes in another form: train.epochs=200 mixer.alpha=1.0."""
    limit: int | None = None
    """A trial on this many training images, and at most as many test images."""
    minutes: float | None = None
    """Stop the runs after this many minutes, with exit status 75; the same command resumes them."""
    launcher: Literal["local", "slurm", "ray"] = "local"
    """Where they run: here, as jobs of Slurm (pip install 'alignmixup[slurm]') or as tasks of Ray
    (pip install 'alignmixup[ray]'). --out must be a folder that all machines see."""
    launch: tuple[str, ...] = ()
    """Options of the launcher, e.g. slurm_partition=gpu timeout_min=600, or num_gpus=1."""
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
            launcher=self.launcher,
            launch=dict(parse_setting(text, "num_gpus=1", "--launch") for text in self.launch),
            on_change=lambda job: print(job, flush=True),
        )
        undone = [job for job in jobs if job.state != "done"]
        print(f"{len(jobs) - len(undone)} of {len(jobs)} done in {self.out}")
        if any(job.state.startswith("failed") for job in undone):
            raise RuntimeError("some runs failed; their logs are beside their folders")
        if any(job.state.startswith("in use") for job in undone):
            raise RuntimeError("another process trains some of the runs; run again when it is done")
        if undone:
            print("run again to resume the rest")
            raise SystemExit(UNFINISHED)


def parse_sweep(args: list[str]) -> Call:
    """Read the words after ``sweep``, settings of recipes among them."""
    words, settings = take_settings(args)
    named = [word for word in words if not word.startswith("-")]
    sweep = read_words(Sweep, "sweep", words, settings=lambda: _settings_of(named))
    return partial(sweep, settings)
