"""The demo from its data to its page, with one progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from alignmixup.contracts import Result
from alignmixup.datasets import draw_shapes
from alignmixup.demo.setup import CLASSES, DECODER, LAYER, METHODS, Size, recipe, score, sets_of
from alignmixup.demo.story import folder_name, write_story
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.decoding import train_decoder
from alignmixup.experiments.load import load_run
from alignmixup.experiments.painters import features_at
from alignmixup.experiments.run import train
from alignmixup.figures.pose_plans import assignment, object_match
from alignmixup.figures.run_pictures import write_pictures
from alignmixup.training.loggers import Logger
from alignmixup.training.progress import duration

# Work in units of a training step, measured on a CPU.
SCORING, DRAWING, DECODER_STEP = 40, 60, 0.8
NUM_PAIRS = 64  # of the measure of where objects land


def demo(out: Path, size: Size | None = None) -> Path:
    """Train three small networks, score them and write one page; return its path.

    A demo that was stopped in ``out`` is continued.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once a page of what is finished is written.
    """
    size = size or Size()
    results: dict[str, list[Result]] = {}
    match: dict[str, float] = {}
    todo = [*METHODS, "decoded pictures"]
    sets = sets_of(size)
    steps = size.epochs * (size.num_train // size.batch_size)
    decoder_steps = DECODER.epochs * (size.num_train // DECODER.batch_size)
    total = len(METHODS) * (steps + SCORING) + DECODER_STEP * decoder_steps + DRAWING
    try:
        with Bar(total) as bar:
            for number, (name, (method, mixer)) in enumerate(METHODS.items()):
                bar.stage(f"training with {name}", number * (steps + SCORING))
                folder = out / "runs" / folder_name(name)
                train(recipe(method, mixer, size), folder, sets=sets, loggers=[bar], quiet=True)
                bar.stage(f"scoring {name}", number * (steps + SCORING) + steps)
                results[name] = score(folder, sets)
                todo.remove(name)
            bar.stage("training a decoder", len(METHODS) * (steps + SCORING))
            train_decoder(
                folder,
                DECODER,
                sets=sets,
                device="cpu",
                quiet=True,
                on_step=lambda: bar.advance(DECODER_STEP),
            )
            bar.stage("drawing", total - DRAWING)
            write_pictures(folder, images=sets.test, seed=size.seed, device="cpu")
            match |= where_objects_land(folder, sets)
            todo.clear()
            page = write_story(out, size, results, match)
            bar.advance(DRAWING)
    except KeyboardInterrupt:
        print("stopped; writing the page of what is finished ...", file=sys.stderr)
        page = write_story(out, size, results, match, todo)
        print(f"open in a browser: {page.resolve().as_uri()}", file=sys.stderr)
        print("the same command continues the demo", file=sys.stderr)
        raise
    return page


@torch.no_grad()
def where_objects_land(folder: Path, sets: Sets) -> dict[str, float]:
    """How well the object of a partner lands on that of its anchor, by plan.

    The silhouettes are those of the drawing; only plans are measured, no decoder.
    """
    drawn = draw_shapes("test", len(sets.test) * 10 // len(CLASSES) + 10)
    wanted = torch.tensor([drawn.image_set.class_names.index(name) for name in CLASSES])
    num_images = min(NUM_PAIRS, len(sets.test))
    masks = drawn.truth.masks[torch.isin(drawn.image_set.labels, wanted)][:num_images]
    x = sets.test.images[: len(masks)].float() / 255
    features = features_at(load_run(folder, device="cpu").model, LAYER, x)
    perm = torch.arange(len(x)).roll(1)
    return {
        plan: object_match(masks, perm, assignment(features, perm, plan, masks))
        for plan in ("aligned", "unaligned")
    }


class Bar(Logger):
    """One bar for the whole demo with the time left; elsewhere than on a terminal, lines."""

    def __init__(self, total: float) -> None:
        self._total, self._done, self._begin, self._base = total, 0.0, time.monotonic(), 0.0
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Bar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def stage(self, name: str, done: float) -> None:
        """Name what begins, when ``done`` of the work is finished."""
        self._base = done
        self._set(done)
        if self._bar:
            self._bar.update(self._task, description=name)
            return
        spent = time.monotonic() - self._begin
        left = f", about {duration(spent / done * (self._total - done))} left" if done else ""
        print(f"{name}{left}", file=sys.stderr)

    def advance(self, work: float = 1.0) -> None:
        self._set(self._done + work)

    def start(self, settings: Mapping[str, Any]) -> None:
        epoch, step = settings["position"]  # not the first where a run is resumed
        self._set(self._base + epoch * settings["steps"] + step)

    def step(self) -> None:
        self.advance()

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        """Show nothing: the page has the values."""

    def _set(self, done: float) -> None:
        self._done = done
        if self._bar:
            self._bar.update(self._task, completed=done)
