"""The tasks by name: what each does with a model and its images, and what can be chosen of it.

Settings of a task are those of its function in ``tasks`` that have a default, by the same names;
what evaluation decides for all tasks (seed, normalisation, precision) is not among them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from alignmixup.contracts import Result
from alignmixup.evaluation.cam import find_pool_head
from alignmixup.evaluation.forward import (
    Batches,
    Forward,
    PixelBatches,
    amp_name,
    collect_logits,
    labelled_pixels,
    predict,
)
from alignmixup.evaluation.tasks.accuracy import accuracy
from alignmixup.evaluation.tasks.attack import fgsm, pgd, strong_attack
from alignmixup.evaluation.tasks.calibration import calibration, temperature_scaling
from alignmixup.evaluation.tasks.compute import cost
from alignmixup.evaluation.tasks.localization import LocalizationSettings, localization
from alignmixup.evaluation.tasks.ood import ood_from_logits
from alignmixup.experiments.outliers import Outliers
from alignmixup.experiments.subjects import Pictures, Subject
from alignmixup.recipes.schema import check_kind
from alignmixup.registry import suggestion

__all__ = ["DETECTION", "TASKS", "LeftOut", "OnImages", "Scene", "check_options", "task_names"]

OnImages = Callable[[int, int | None], None]
Options = Mapping[str, Any]

DETECTION = (
    "it trains a detector first, with the network as its backbone: use 'alignmixup detect RUN "
    "--data voc' (or coco)"
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
        return PixelBatches(_Counted(self.pictures.batches, self.say))

    def shared(self) -> dict[str, Any]:
        """What nearly every task is told."""
        return {"normalised_by": self.pictures.normalised_by, "amp_dtype": self.amp}

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """Pixels and labels of the first batch, on the model's device."""
        return next(labelled_pixels(self.pictures.batches, None, self.subject.device()))


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


@dataclass(frozen=True)
class Task:
    """One evaluation: how it is done, and the functions or records that define its settings."""

    run: Callable[[Scene, Options], list[Result]]
    defined_by: Sequence[Callable[..., Any]]

    def options(self) -> dict[str, Any]:
        """The type of each setting that can be chosen, by name."""
        found = {}
        for owner in self.defined_by:
            hints = get_type_hints(owner)
            for name, parameter in inspect.signature(owner).parameters.items():
                if parameter.default is not parameter.empty and name not in _DECIDED:
                    found[name] = hints[name]
        return found


# What the scene decides, or holds.
_DECIDED = frozenset(
    {"seed", "normalised_by", "amp_dtype", "amp", "on_images", "y", "mixer", "settings"}
)


def task_names(tasks: Sequence[str]) -> list[str]:
    """The tasks that are meant, each once; no task, or one that there is not, is an error."""
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a list of names: write [{tasks!r}]")
    if "detection" in tasks:
        raise ValueError(f"detection is no task of evaluate: {DETECTION}")
    unknown = sorted(set(tasks) - {*TASKS, "all"})
    if unknown or not tasks:
        what = f"unknown tasks {unknown}" if unknown else "no task is named"
        near = suggestion(unknown[0], [*TASKS]) if unknown else ""
        raise ValueError(f"{what}{near or f'; there are {[*TASKS]}'}")
    return list(TASKS) if "all" in tasks else list(dict.fromkeys(tasks))


def check_options(options: Mapping[str, Options], names: Sequence[str]) -> None:
    """Raise for settings of a task that is not done, that it has not, or of another type."""
    for task, chosen in options.items():
        if task not in TASKS:
            raise ValueError(f"options for an unknown task {task!r}; there are {list(TASKS)}")
        if task not in names:
            raise ValueError(
                f"options for {task!r}, which is not among the tasks {list(names)}: add it"
            )
        if not isinstance(chosen, Mapping):
            raise ValueError(
                f"the options of {task!r} must be a dictionary of names and values, got {chosen!r}"
            )
        known = TASKS[task].options()
        for name, value in chosen.items():
            if name not in known:
                raise ValueError(f"{task} has no option {name!r}; it has {sorted(known) or 'none'}")
            check_kind(f"{task}.{name}", value, known[name])


def _plain(task: Callable[..., list[Result]]) -> Task:
    return Task(
        lambda scene, chosen: task(scene.model, scene.batches(), **scene.shared(), **chosen),
        [task],
    )


def _attack(task: Callable[..., list[Result]], *, is_seeded: bool = True) -> Task:
    def run(scene: Scene, chosen: Options) -> list[Result]:
        seeded = {"seed": scene.seed} if is_seeded else {}
        # Attacks say by themselves how far they are: a batch of theirs may take minutes.
        batches = PixelBatches(scene.pictures.batches)
        told = {"on_images": scene.say, **seeded, **scene.shared()}
        return task(scene.model, batches, **told, **chosen)

    return Task(run, [task])


def _temperature(scene: Scene, chosen: Options) -> list[Result]:
    results = temperature_scaling(
        scene.model, scene.batches(), seed=scene.seed, **scene.shared(), **chosen
    )
    return [dataclasses.replace(r, task="temperature") for r in results]


def _ood(scene: Scene, chosen: Options) -> list[Result]:
    inside = collect_logits(scene.model, scene.batches(), **scene.shared()).logits
    results = []
    for source in scene.outliers:
        try:
            batches = PixelBatches(source.read(len(inside)))
        except (ValueError, OSError) as error:
            if source.name in scene.demanded:
                raise
            scene.left_out[f"ood {source.name}"] = str(error)
            continue
        outside = predict(scene.model, batches, **scene.shared())
        how = {"amp": amp_name(scene.amp), "seed": source.seed, **chosen}
        results += ood_from_logits(inside, outside, source.name, **how)
    if not results:
        raise LeftOut("no out-of-distribution images")
    return results


def _localization(scene: Scene, chosen: Options) -> list[Result]:
    boxes = scene.pictures.boxes
    if boxes is None:
        raise LeftOut(f"{scene.pictures.name} has no boxes")
    if not any(len(of_image) for of_image in boxes):
        raise LeftOut(f"no image of {scene.pictures.name} has a box")
    layers = {name: chosen[name] for name in ("layer", "classifier") if name in chosen}
    settings = LocalizationSettings(**{k: v for k, v in chosen.items() if k not in layers})
    if not layers and not hasattr(scene.model, "class_maps"):
        x, _ = scene.first_batch()
        try:
            find_pool_head(scene.model, x, normalised_by=scene.pictures.normalised_by)
        except ValueError as error:
            raise LeftOut(f"no class activation maps: {error}") from error
    # A list may name some of the images only: the others are not scored.
    batches = PixelBatches(_Boxed(scene.batches(), boxes))
    boxed = [of_image for of_image in boxes if len(of_image)]
    return localization(scene.model, batches, boxed, settings=settings, **layers, **scene.shared())


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


def _cost(scene: Scene, chosen: Options) -> list[Result]:
    size = 128  # the paper's batch
    x, y = (part[:size] for part in scene.first_batch())
    as_wanted = Forward(scene.model, scene.pictures.normalised_by).prepared(x)
    told = {"num_steps": 10, "num_warmup": 3, "seed": scene.seed, "amp_dtype": scene.amp, **chosen}
    return cost(scene.model, as_wanted, y, mixer=scene.subject.mixer, **told)


TASKS: dict[str, Task] = {
    "accuracy": _plain(accuracy),
    "fgsm": _attack(fgsm, is_seeded=False),
    "pgd": _attack(pgd),
    "strong_attack": _attack(strong_attack),
    "calibration": _plain(calibration),
    "temperature": Task(_temperature, [temperature_scaling]),
    "ood": Task(_ood, [ood_from_logits]),
    "localization": Task(_localization, [LocalizationSettings, localization]),
    "cost": Task(_cost, [cost]),
}
