"""Evaluation of a trained run or of any module: the tasks by name, and what the data allow.

A task that cannot be done here (no boxes, no pooled head) is left out with its reason; a task that
was asked for by name and cannot be done is left out just as loudly. Sources of out-of-distribution
images that "all" stands for are left out in the same way; one that was named is an error if it
cannot be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Result
from alignmixup.recipes.outliers import Outliers, find_outliers, sources_for
from alignmixup.recipes.provenance import provenance
from alignmixup.recipes.run_folder import append_results
from alignmixup.recipes.subjects import Pictures, Subject, open_pictures, open_subject
from alignmixup.tasks import ood as ood_task
from alignmixup.tasks._forward import (
    Batches,
    Normalisation,
    amp_name,
    collect_logits,
    predict,
)
from alignmixup.tasks.accuracy import accuracy
from alignmixup.tasks.attack import fgsm, pgd, strong_attack
from alignmixup.tasks.calibration import calibration, temperature_scaling
from alignmixup.tasks.cam import find_pool_head
from alignmixup.tasks.cost import cost
from alignmixup.tasks.localization import localization

__all__ = ["TASKS", "Evaluation", "evaluate", "task_names"]

OnTask = Callable[[str], None]
OnImages = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Evaluation:
    """What was measured and, by task, why something was not."""

    results: list[Result]
    left_out: dict[str, str] = field(default_factory=dict)

    def value(self, task: str, metric: str, source: str | None = None) -> float:
        """Return one figure; one that was not measured is an error that lists what was.

        ``source`` names the out-of-distribution images where there are several.
        """
        for result in self.results:
            fits = source is None or result.settings.get("source") == source
            if fits and (result.task, result.metric) == (task, metric):
                return result.value
        have = sorted({(r.task, r.metric) for r in self.results})
        raise ValueError(
            f"no result {task}/{metric}{f' of {source}' if source else ''}; there are {have}"
        )


class LeftOut(Exception):
    """This task cannot be done with this model or these data; the text says why."""


@dataclass(frozen=True)
class Scene:
    """All that a task may look at, and whom it tells how far it is or what it leaves out."""

    subject: Subject
    pictures: Pictures
    outliers: Sequence[Outliers]
    demanded: Sequence[str]
    seed: int
    amp: torch.dtype | None
    left_out: dict[str, str]
    on_images: OnImages | None

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    def say(self, done: int) -> None:
        if self.on_images:
            self.on_images(done, self.pictures.num_images)

    def batches(self) -> Batches:
        """The batches, with progress said after each."""
        return _Counted(self.pictures.batches, self.say)

    def options(self) -> dict[str, Any]:
        """What nearly every task is told."""
        return {"normalised_by": self.pictures.normalised_by, "amp_dtype": self.amp}

    def first_batch(self) -> tuple[Tensor, Tensor]:
        x, y = next(iter(self.pictures.batches))
        return x.to(self.subject.device()), y.to(self.subject.device())


def evaluate(
    run: Path | str | nn.Module,
    images: ImageSet | Batches | None = None,
    *,
    tasks: Sequence[str] = ("accuracy",),
    ood: Sequence[str] = ("all",),
    boxes: Sequence[Tensor] | None = None,
    normalised_by: Normalisation | None = None,
    data_root: Path | str | None = None,
    batch_size: int = 500,
    seed: int = 0,
    device: str = "auto",
    amp_dtype: torch.dtype | None = None,
    on_task: OnTask | None = None,
    on_images: OnImages | None = None,
) -> Evaluation:
    """Score a run's folder, or any module that gives logits, by the tasks named.

    ``tasks=["all"]`` does what the data allow; ``ood`` names the out-of-distribution sources, "all"
    for those that are there. A run is scored on the test split of its own data unless ``images``
    are given, and its results are appended to its folder. A module is scored on an ``ImageSet``, or
    on batches (x, y) that can be read again, a DataLoader for instance; ``boxes`` holds the true
    boxes [k, 4] of each image of theirs. ``normalised_by`` is the (mean, std) that the module
    expects its images to be normalised by, and by which the batches, if any, are.

    ``on_task`` is told the name of each task, ``on_images`` how many images of how many are done.
    """
    names = task_names(tasks)
    demanded = [name for name in ood if name != "all"]
    if demanded and "ood" not in names:
        raise ValueError(
            f"out-of-distribution sources {demanded} are named, but 'ood' is not among the tasks "
            f"{names}: add it"
        )
    subject, own = open_subject(run, images, data_root, device)
    pictures = open_pictures(subject, own, boxes, normalised_by, batch_size)
    done = Evaluation([])
    outliers: list[Outliers] = []
    if "ood" in names:
        outliers = _outliers(pictures, ood, demanded, seed, data_root, done.left_out)
    scene = Scene(subject, pictures, outliers, demanded, seed, amp_dtype, done.left_out, on_images)
    for name in names:
        if on_task:
            on_task(name)
        try:
            results = TASKS[name](scene)
        except LeftOut as why:
            done.left_out[name] = str(why)
            continue
        stamped = [r.stamped(**subject.where, **provenance()) for r in results]
        done.results.extend(stamped)
        if subject.folder is not None:
            append_results(subject.folder, stamped)
    return done


def task_names(tasks: Sequence[str]) -> list[str]:
    """The tasks that are meant, each once; no task, or one that there is not, is an error."""
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a list of names: write [{tasks!r}]")
    unknown = sorted(set(tasks) - {*TASKS, "all"})
    if unknown or not tasks:
        what = f"unknown tasks {unknown}" if unknown else "no task is named"
        raise ValueError(f"{what}; there are {[*TASKS, 'all']}")
    return list(TASKS) if "all" in tasks else list(dict.fromkeys(tasks))


@dataclass(frozen=True)
class _Counted:
    batches: Batches
    say: Callable[[int], None]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for batch in self.batches:
            yield batch
            done += len(batch[0])
            self.say(done)


def _outliers(
    pictures: Pictures,
    names: Sequence[str],
    demanded: Sequence[str],
    seed: int,
    root: Path | str | None,
    left_out: dict[str, str],
) -> list[Outliers]:
    """Look for the sources before anything is measured: a misspelt one must not cost an hour."""
    wanted = [n for n in sources_for(pictures.name) if "all" in names and n not in demanded]
    found = []
    for name in [*wanted, *demanded]:
        try:
            found.append(find_outliers(name, pictures.image_size, seed=seed, root=root))
        except (ValueError, OSError) as error:
            if name in demanded:
                raise
            left_out[f"ood {name}"] = str(error)
    return found


def _ood(scene: Scene) -> list[Result]:
    inside = collect_logits(scene.model, scene.batches(), **scene.options()).logits
    results = []
    for source in scene.outliers:
        try:
            batches = source.read(len(inside))
        except (ValueError, OSError) as error:
            if source.name in scene.demanded:
                raise
            scene.left_out[f"ood {source.name}"] = str(error)
            continue
        outside = predict(scene.model, batches, given_pixels=True, **scene.options())
        results += ood_task.ood_from_logits(inside, outside, source.name, amp=amp_name(scene.amp))
    if not results:
        raise LeftOut("no out-of-distribution images")
    return results


def _plain(task: Callable[..., list[Result]]) -> Callable[[Scene], list[Result]]:
    return lambda scene: task(scene.model, scene.batches(), **scene.options())


def _attack(
    task: Callable[..., list[Result]], *, is_seeded: bool = True
) -> Callable[[Scene], list[Result]]:
    def run(scene: Scene) -> list[Result]:
        seeded = {"seed": scene.seed} if is_seeded else {}
        # Attacks say by themselves how far they are: a batch of theirs may take minutes.
        batches = scene.pictures.batches
        return task(scene.model, batches, on_images=scene.say, **seeded, **scene.options())

    return run


def _temperature(scene: Scene) -> list[Result]:
    results = temperature_scaling(scene.model, scene.batches(), seed=scene.seed, **scene.options())
    return [dataclasses.replace(r, task="temperature") for r in results]


def _localization(scene: Scene) -> list[Result]:
    boxes = scene.pictures.boxes
    if boxes is None:
        raise LeftOut(f"{scene.pictures.name} has no boxes")
    if not any(len(of_image) for of_image in boxes):
        raise LeftOut(f"no image of {scene.pictures.name} has a box")
    if not hasattr(scene.model, "class_maps"):
        x, _ = scene.first_batch()
        try:
            find_pool_head(scene.model, x[:2])
        except ValueError as error:
            raise LeftOut(f"no class activation maps: {error}") from error
    # A list may name some of the images only: the others are not scored.
    batches = _Boxed(scene.batches(), boxes)
    boxed = [of_image for of_image in boxes if len(of_image)]
    return localization(scene.model, batches, boxed, **scene.options())


@dataclass(frozen=True)
class _Boxed:
    """The images that have a box."""

    batches: Batches
    boxes: Sequence[Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        has_box = torch.tensor([len(of_image) > 0 for of_image in self.boxes])
        start = 0
        for x, y in self.batches:
            here = has_box[start : start + len(x)]
            start += len(x)
            # One box too few is localization's to say.
            yield (x, y) if len(here) < len(x) or here.all() else (x[here], y[here])


def _cost(scene: Scene) -> list[Result]:
    x, y = scene.first_batch()
    size = 128  # the paper's batch
    return cost(
        scene.model,
        x[:size],
        y[:size],
        mixer=scene.subject.mixer,
        num_steps=10,
        num_warmup=3,
        seed=scene.seed,
        amp_dtype=scene.amp,
    )


TASKS: dict[str, Callable[[Scene], list[Result]]] = {
    "accuracy": _plain(accuracy),
    "fgsm": _attack(fgsm, is_seeded=False),
    "pgd": _attack(pgd),
    "strong_attack": _attack(strong_attack),
    "calibration": _plain(calibration),
    "temperature": _temperature,
    "ood": _ood,
    "localization": _localization,
    "cost": _cost,
}
