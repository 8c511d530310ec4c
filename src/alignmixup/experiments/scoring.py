"""Evaluation of a trained run or of any module: the tasks by name, and what the data allow.

A task that cannot be done here (no boxes, no pooled head) is left out with its reason; a task that
was asked for by name and cannot be done is left out just as loudly. Sources of out-of-distribution
images that "all" stands for are left out in the same way; one that was named is an error if it
cannot be read. A task that fails takes no figure of another with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from alignmixup.contracts import ImageSet, Result
from alignmixup.datasets.folder import FileSet
from alignmixup.evaluation.forward import Batches, Normalisation
from alignmixup.experiments.outliers import Outliers, find_outliers, sources_for
from alignmixup.experiments.provenance import provenance
from alignmixup.experiments.run_folder import append_results
from alignmixup.experiments.scored_tasks import (
    DETECTION,
    TASKS,
    LeftOut,
    OnImages,
    Scene,
    check_options,
    task_names,
)
from alignmixup.experiments.subjects import Pictures, Subject, open_pictures, open_subject

__all__ = ["TASKS", "Evaluation", "evaluate", "task_names"]

OnTask = Callable[[str], None]


@dataclass(frozen=True)
class Evaluation:
    """What was measured and, by task, why something was not: it cannot be, or it ``failed``."""

    results: list[Result]
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def value(self, task: str, metric: str, source: str | None = None) -> float:
        """Return one figure; one that was not measured is an error that lists what was.

        ``source`` names the out-of-distribution images where there are several.
        """
        found = {
            str(r.settings.get("source", "")): r.value
            for r in reversed(self.results)
            if (r.task, r.metric) == (task, metric) and source in (None, r.settings.get("source"))
        }
        if len(found) > 1:
            raise ValueError(
                f"{task}/{metric} was measured for several sources: name one of {sorted(found)}"
            )
        if found:
            return next(iter(found.values()))
        have = sorted({(r.task, r.metric) for r in self.results})
        why = self.failed.get(task) or self.left_out.get(task)
        raise ValueError(
            f"no result {task}/{metric}{f' of {source}' if source else ''}"
            f"{f' ({why})' if why else ''}; there are {have}"
        )


def evaluate(
    run: Path | str | nn.Module,
    images: ImageSet | FileSet | Batches | None = None,
    *,
    tasks: Sequence[str] = ("accuracy",),
    options: Mapping[str, Mapping[str, object]] | None = None,
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
    """Score a run, or any module that returns logits, by the named tasks.

    Args:
        run: Folder of a run, or a module.
        images: An ``ImageSet``, or batches ``(x, y)`` that can be read again, such as a DataLoader.
            A run defaults to the test split of its own data.
        tasks: Names of tasks; ``["all"]`` for everything the data allow.
        options: Settings of tasks that differ from the defaults, ``{"pgd": {"num_steps": 40}}``.
        ood: Out-of-distribution sources; ``["all"]`` for those that are available.
        boxes: True boxes ``[k, 4]`` of each image of the batches, for localization.
        normalised_by: ``(mean, std)`` that the module expects images to be normalized by, and that
            batches are normalized by.
        data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.
        batch_size: Images per forward pass, for images in memory.
        seed: Seed of random starts and noise.
        device: ``auto``, ``cpu``, ``cuda``, ...
        amp_dtype: Run the module under autocast in this type.
        on_task: Called with the name of each task before it runs.
        on_images: Called with the number of images done and the total.

    Returns:
        The results; ``value(task, metric)`` returns one of them. Tasks that the data do not allow
        are in ``left_out`` and tasks that failed after others succeeded in ``failed``, each with
        the reason. Results of a run are also appended to its ``results.jsonl``.

    Raises:
        ValueError: If a task, option or source is unknown, or images are not in [0, 1].

    Example:
        ```python
        scores = am.evaluate(model, [(x, y)], tasks=["accuracy", "calibration"], device="cpu")
        print(scores.value("accuracy", "top1"), scores.value("calibration", "ece"))
        ```
    """
    names, options = task_names(tasks), options or {}
    check_options(options, names)
    demanded = _demanded(ood, names)
    subject, own = open_subject(run, images, data_root, device)
    pictures = open_pictures(subject, own, boxes, normalised_by, batch_size)
    done = Evaluation([], {"detection": DETECTION} if "all" in tasks else {})
    outliers: list[Outliers] = []
    if "ood" in names:
        outliers = _outliers(pictures, ood, demanded, seed, data_root, done.left_out)
    scene = Scene(subject, pictures, outliers, demanded, seed, amp_dtype, done.left_out, on_images)
    for name in names:
        if on_task:
            on_task(name)
        try:
            results = TASKS[name].run(scene, options.get(name, {}))
        except LeftOut as why:
            done.left_out[name] = str(why)
            continue
        except Exception as error:
            if not done.results:
                raise
            done.failed[name] = f"{type(error).__name__}: {error}"
            continue
        stamped = _stamped(results, subject, images)
        done.results.extend(stamped)
        if subject.folder is not None:
            append_results(subject.folder, stamped)
    return done


def _demanded(ood: Sequence[str], names: Sequence[str]) -> list[str]:
    """The out-of-distribution sources that are named one by one."""
    if isinstance(ood, str):
        raise ValueError(f"ood must be a list of names: write [{ood!r}]")
    demanded = [name for name in ood if name != "all"]
    if demanded and "ood" not in names:
        raise ValueError(
            f"out-of-distribution sources {demanded} are named, but 'ood' is not among the tasks "
            f"{names}: add it"
        )
    return demanded


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
            source = find_outliers(
                name, pictures.shape, seed=seed, root=root, inside=pictures.batches
            )
        except (ValueError, OSError) as error:
            if name in demanded:
                raise
            left_out[f"ood {name}"] = str(error)
        else:
            found.append(source)
    return found


def _stamped(
    results: Sequence[Result], subject: Subject, given: ImageSet | FileSet | Batches | None
) -> list[Result]:
    """The results with where they come from and, unless it was the run's own, the data."""
    where = {**subject.where, **provenance(subject.device())}
    if not isinstance(given, ImageSet | FileSet):
        return [r.stamped(**where) for r in results]
    images = f"{given.name}/{given.split}, {len(given)} images"
    return [
        dataclasses.replace(r, settings={**r.settings, "images": images}).stamped(**where)
        for r in results
    ]
