"""Evaluation of a trained run or of any module: the tasks by name, and what the data allow.

A task that cannot be done here (no boxes, no out-of-distribution data) is left out with its reason;
a task that was asked for by name and cannot be done is left out just as loudly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from alignmixup import data
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.recipes.run import append_results, open_run, pick_device, provenance, read_recipe
from alignmixup.tasks import ood as ood_task
from alignmixup.tasks._forward import collect_logits, predict
from alignmixup.tasks.accuracy import accuracy
from alignmixup.tasks.attack import fgsm, pgd, strong_attack
from alignmixup.tasks.calibration import calibration, temperature_scaling
from alignmixup.tasks.cam import find_pool_head
from alignmixup.tasks.cost import cost
from alignmixup.tasks.localization import localization

__all__ = ["TASKS", "Evaluation", "evaluate"]

Report = Callable[[str], None]


@dataclass(frozen=True)
class Evaluation:
    """What was measured and, by task, why something was not."""

    results: list[Result]
    left_out: dict[str, str] = field(default_factory=dict)

    def value(self, task: str, metric: str) -> float:
        """Return one figure; one that was not measured is an error that lists what was."""
        for result in self.results:
            if (result.task, result.metric) == (task, metric):
                return result.value
        have = sorted({(r.task, r.metric) for r in self.results})
        raise ValueError(f"no result {task}/{metric}; there are {have}")


class LeftOut(Exception):
    """This task cannot be done with this model or these data; the text says why."""


@dataclass(frozen=True)
class Scene:
    """What a task may look at."""

    model: nn.Module
    images: ImageSet
    batches: data.EvalBatches
    data_root: Path | str | None
    seed: int
    amp: torch.dtype | None
    mixer: Mixer | None


def evaluate(
    run: Path | str | nn.Module,
    images: ImageSet | None = None,
    *,
    tasks: Sequence[str] = ("accuracy",),
    data_root: Path | str | None = None,
    batch_size: int = 500,
    seed: int = 0,
    device: str = "auto",
    amp_dtype: torch.dtype | None = None,
    on_task: Report | None = None,
) -> Evaluation:
    """Score a run's folder, or a module that takes images in [0, 1], by the tasks named.

    ``tasks=["all"]`` does what the data allow. A run is scored on the test split of its own data
    unless ``images`` are given, and its results are appended to its folder.
    """
    names = list(TASKS) if list(tasks) == ["all"] else list(tasks)
    unknown = sorted(set(names) - set(TASKS))
    if unknown:
        raise ValueError(f"unknown tasks {unknown}; there are {[*TASKS, 'all']}")
    model, images, where, folder, mixer = _subject(run, images, data_root, device)
    first = next(model.parameters(), torch.zeros(()))
    batches = data.eval_batches(images, batch_size, first.device)
    scene = Scene(model, images, batches, data_root, seed, amp_dtype, mixer)
    done = Evaluation([])
    for name in names:
        if on_task:
            on_task(name)
        try:
            results = TASKS[name](scene)
        except LeftOut as why:
            done.left_out[name] = str(why)
            continue
        stamped = [r.stamped(**where, **provenance()) for r in results]
        done.results.extend(stamped)
        if folder is not None:
            append_results(folder, stamped)
    return done


def _subject(
    run: Path | str | nn.Module,
    images: ImageSet | None,
    data_root: Path | str | None,
    device: str,
) -> tuple[nn.Module, ImageSet, dict[str, object], Path | None, Mixer | None]:
    if isinstance(run, nn.Module):
        if images is None:
            raise ValueError("a module is scored on images: pass an ImageSet")
        if device != "auto":
            run = run.to(pick_device(device))
        return run, images, {"recipe": type(run).__name__}, None, None
    recipe = read_recipe(Path(run))
    images = images or data.load(recipe.data.name, "test", data_root)
    opened = open_run(run, images.num_classes, images.images.shape[-1], device)
    where = {"recipe": recipe.name, "seed": recipe.train.seed, "epoch": opened.epoch}
    return opened.net, images, where, opened.folder, recipe.mixer


def _ood(scene: Scene) -> list[Result]:
    inside = collect_logits(scene.model, scene.batches, amp_dtype=scene.amp).logits
    results = []
    for source, batches in _sources(scene):
        outside = predict(scene.model, batches, amp_dtype=scene.amp)
        results += ood_task.ood_from_logits(inside, outside, source)
    return results


def _sources(scene: Scene) -> Iterator[tuple[str, Iterable[Tensor]]]:
    n, size = len(scene.images), scene.images.images.shape[-1]
    yield "uniform", ood_task.uniform_noise(n, size, scene.seed)
    yield "gaussian", ood_task.gaussian_noise(n, size, scene.seed)
    other = {"cifar10": "cifar100", "cifar100": "cifar10"}.get(scene.images.name)
    if other and (images := _if_there(other, scene.data_root)) is not None:
        yield other, _batches(images)
    if scene.images.name != "tiny" and (images := _if_there("tiny", scene.data_root)) is not None:
        yield "tiny-crop", _batches(ood_task.centre_crop(images, size))
        yield "tiny-resize", _batches(ood_task.resize(images, size))


def _if_there(name: str, data_root: Path | str | None) -> Tensor | None:
    """The test images of a data set, or None where it is not (wholly) there."""
    try:
        return data.load(name, "test", data_root).images
    except (FileNotFoundError, ValueError):
        return None


def _batches(images: Tensor) -> list[Tensor]:
    return [batch.float() / 255 for batch in torch.split(images, 500)]


def _with_amp(task: Callable[..., list[Result]]) -> Callable[[Scene], list[Result]]:
    def run(scene: Scene) -> list[Result]:
        return task(scene.model, scene.batches, amp_dtype=scene.amp)

    return run


def _seeded(task: Callable[..., list[Result]]) -> Callable[[Scene], list[Result]]:
    def run(scene: Scene) -> list[Result]:
        return task(scene.model, scene.batches, seed=scene.seed, amp_dtype=scene.amp)

    return run


def _temperature(scene: Scene) -> list[Result]:
    results = temperature_scaling(scene.model, scene.batches, seed=scene.seed, amp_dtype=scene.amp)
    return [dataclasses.replace(r, task="temperature") for r in results]


def _localization(scene: Scene) -> list[Result]:
    if scene.images.boxes is None:
        raise LeftOut(f"{scene.images.name} has no boxes")
    x, _ = next(iter(scene.batches))
    try:
        find_pool_head(scene.model, x[:2])
    except ValueError as error:
        raise LeftOut(f"no class activation maps: {error}") from error
    return localization(scene.model, scene.batches, scene.images.boxes, amp_dtype=scene.amp)


def _cost(scene: Scene) -> list[Result]:
    x, y = next(iter(scene.batches))
    size = 128  # the paper's batch
    return cost(
        scene.model,
        x[:size],
        y[:size],
        mixer=scene.mixer,
        num_steps=10,
        num_warmup=3,
        seed=scene.seed,
        amp_dtype=scene.amp,
    )


TASKS: dict[str, Callable[[Scene], list[Result]]] = {
    "accuracy": _with_amp(accuracy),
    "fgsm": _with_amp(fgsm),
    "pgd": _seeded(pgd),
    "strong_attack": _seeded(strong_attack),
    "calibration": _with_amp(calibration),
    "temperature": _temperature,
    "ood": _ood,
    "localization": _localization,
    "cost": _cost,
}
