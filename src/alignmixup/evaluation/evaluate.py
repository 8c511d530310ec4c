"""Score a model by tasks: what each task gets, which are skipped, what is recorded.

A task that these data or this model do not allow is skipped with the reason, and so is an
out-of-distribution source that "all" stands for. If a task fails, the others' results are kept.

Of several processes each has its share of the images, in tasks that take an argument ``team``; all
other tasks run in rank 0 alone. Every process gets all results, and rank 0 saves them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignmixup.checking import check_seed
from alignmixup.contracts import ImageSet, Result, Skipped
from alignmixup.datasets.folder import FileSet
from alignmixup.evaluation.forward import ALONE, Batches, Normalization, PixelBatches, Pixels
from alignmixup.evaluation.outliers import Outliers, find_outliers, sources_for
from alignmixup.evaluation.subject import (
    EvalImages,
    Subject,
    eval_images,
    import_plugins_of,
    open_subject,
)
from alignmixup.evaluation.task_options import (
    DETECTION,
    check_options,
    check_sources,
    parameters_of,
    task_arguments,
    task_names,
)
from alignmixup.registry import TASKS
from alignmixup.training.distributed import Team
from alignmixup.training.watch import RankLost, is_of_communication

OnImages = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Scores:
    """Results, and by task why there is none: it was skipped (``left_out``), or it ``failed``."""

    results: list[Result]
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def value(self, task: str, metric: str, source: str | None = None) -> float:
        """Return one value; ``source`` names the out-of-distribution images if there are several.

        Raises:
            ValueError: If it was not measured, or for several sources and none is named.
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
    run: Any,
    images: ImageSet | FileSet | Batches | None = None,
    *,
    model: nn.Module | None = None,
    tasks: Sequence[str] = ("accuracy",),
    options: Mapping[str, Mapping[str, object]] | None = None,
    ood: Sequence[str] = ("all",),
    boxes: Sequence[Tensor] | None = None,
    normalized_by: Normalization | None = None,
    data_root: Path | str | None = None,
    batch_size: int = 500,
    seed: int = 0,
    device: str = "auto",
    amp_dtype: torch.dtype | None = None,
    on_task: Callable[[str], None] | None = None,
    on_images: OnImages | None = None,
    team: Team | None = None,
) -> Scores:
    """Score a run, or any module that returns logits, by the named tasks.

    Args:
        run: A run or its folder, or a module.
        images: An ``ImageSet``, or batches ``(x, y)`` that can be read again, such as a DataLoader.
            A run defaults to the test split of its own data.
        model: The module to load the weights into, for a run that trained a module of yours.
        tasks: Names of tasks; ``["all"]`` for everything the data allow.
        options: Settings of tasks that differ from the defaults, ``{"pgd": {"num_steps": 40}}``.
        ood: Out-of-distribution sources; ``["all"]`` for those that are available.
        boxes: True boxes ``[k, 4]`` of each image of the batches, for localization.
        normalized_by: ``(mean, std)`` that the module expects images to be normalized by, and that
            batches are normalized by.
        data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.
        batch_size: Images per forward pass, for images in memory.
        seed: Seed of random starts and noise.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        amp_dtype: Run the module under autocast in this type.
        on_task: Called with the name of each task before it runs.
        on_images: Called with the number of images done and the total.
        team: The processes that score together, from ``alignmixup.training.join_team``; each calls
            this with the same arguments, and all return the same.

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
    import_plugins_of(run)
    names, options = task_names(tasks), options or {}
    check_options(options, names)
    check_sources(ood, names)
    check_seed(seed)
    if amp_dtype not in (None, torch.bfloat16, torch.float16):  # autocast ignores any other
        raise ValueError(
            f"amp_dtype must be a type such as torch.bfloat16, got {amp_dtype!r}: torch.bfloat16, "
            "torch.float16 or None"
        )
    normalized_by = None if normalized_by is None else Pixels.of(normalized_by)
    team = team or ALONE
    with team.guarded():
        subject = open_subject(run, images, data_root, device, model, team)
        shown = eval_images(subject, boxes, normalized_by, batch_size)
    if team.size > 1 and shown.of is None:
        raise ValueError(
            f"{team.size} processes cannot share batches of a loader: pass an ImageSet, or score "
            "in one process"
        )
    scores = Scores([], {"detection": DETECTION} if "all" in tasks else {})
    needed: dict[str, Any] = {
        "seed": seed,
        "amp_dtype": amp_dtype,
        "normalized_by": normalized_by,
        "mixer": subject.mixer,
        "boxes": shown.boxes,
        "team": team,
    }
    with team.guarded():
        if subject.save and team.is_rank_zero:
            subject.save([])  # or the error of a read-only folder, before anything is measured
        if any("outliers" in parameters_of(name) for name in names):
            needed["outliers"] = _outliers(shown, ood, seed, data_root, scores.left_out, team)
        for name in names:
            if on_task:
                on_task(name)
            found = _attempt(name, subject.model, shown, needed, options.get(name, {}), on_images)
            stamped = [_described(r, subject, images) for r in found.results]
            found = _Attempt(stamped, found.left_out, found.failed, found.error)
            if subject.save:
                found = _recordable(name, found)
            if found.error is not None and not scores.results:
                raise found.error
            scores.left_out.update(found.left_out)
            scores.failed.update(found.failed)
            scores.results.extend(found.results)
            if subject.save and team.is_rank_zero:
                subject.save(found.results)
    return scores


@dataclass(frozen=True)
class _Attempt(Scores):
    """What came of one task: results, a reason why there are none, or an error."""

    error: Exception | None = None


def _attempt(
    name: str,
    model: nn.Module,
    images: EvalImages,
    needed: Mapping[str, Any],
    options: Mapping[str, Any],
    on_images: OnImages | None,
) -> _Attempt:
    """Run a task; every process returns what rank 0 has got, or the first error of any."""
    team: Team = needed["team"]
    results: list[Result] = []
    try:
        with team.agreed():
            if team.is_rank_zero or "team" in parameters_of(name):
                results = _run_task(name, model, images, needed, options, on_images)
        with team.agreed():  # another block: what the task calls cannot be taken for this
            results = team.from_rank_zero(results)
    except Skipped as why:
        return _Attempt([], left_out={name: str(why)})
    except Exception as error:
        if isinstance(error, RankLost) or is_of_communication(error):
            raise
        return _failed(name, error)
    return _Attempt(results)


def _failed(name: str, error: Exception) -> _Attempt:
    return _Attempt([], failed={name: f"{type(error).__name__}: {error}"}, error=error)


def _recordable(name: str, found: _Attempt) -> _Attempt:
    """Return what a task found, or its failure if a value of it cannot be written, as NaN."""
    try:
        for result in found.results:
            result.to_json()
    except ValueError as error:
        return _failed(name, error)
    return found


def _run_task(
    name: str,
    model: nn.Module,
    images: EvalImages,
    needed: Mapping[str, Any],
    options: Mapping[str, Any],
    on_images: OnImages | None,
) -> list[Result]:
    parameters, team = parameters_of(name), needed["team"]
    is_shared = team.size > 1 and "team" in parameters and images.of is not None
    batches = images.of(team) if is_shared and images.of is not None else images.batches

    def progress(done: int) -> None:
        team.check_others()
        if on_images:
            done = min(done * team.size, images.num_images or 0) if is_shared else done
            on_images(done, images.num_images)

    def counted() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for batch in batches:
            yield batch
            done += len(batch[0])
            progress(done)

    arguments = {k: v for k, v in needed.items() if k in parameters}
    make: Callable[[], Iterator[Any]] = counted
    if "on_images" in parameters:  # the task reports its own progress
        arguments["on_images"], make = progress, batches.__iter__
    arguments |= task_arguments(name, options)
    results = TASKS[name].function(model, PixelBatches(make), **arguments)
    if not isinstance(results, list | tuple) or not all(isinstance(r, Result) for r in results):
        raise ValueError(f"the task {name!r} must return a list of Result, got {results!r}")
    if others := {result.task for result in results} - {name}:
        raise ValueError(
            f"the task {name!r} returned a Result of the task {min(others)!r}: write "
            f"Result({name!r}, ...)"
        )
    return list(results)


def _described(result: Result, subject: Subject, given: object) -> Result:
    """Stamp where the result is from; name the images if they are not the run's own."""
    settings = {**result.settings, **subject.settings}
    if isinstance(given, ImageSet | FileSet):
        settings["images"] = f"{given.name}/{given.split}, {len(given)} images"
    return result.stamped(**subject.origin, settings=settings)


def _outliers(
    images: EvalImages,
    names: Sequence[str],
    seed: int,
    root: Path | str | None,
    left_out: dict[str, str],
    team: Team,
) -> list[Outliers]:
    """Find the sources before anything is measured, so that a misspelled one costs no time."""
    named = list(dict.fromkeys(name for name in names if name != "all"))
    every = [n for n in sources_for(images.name) if "all" in names and n not in named]
    found = []
    for name in [*every, *named]:
        how: dict[str, Any] = {"seed": seed, "root": root, "inside": images.batches, "team": team}
        try:
            with team.agreed():
                source = find_outliers(name, images.shape, **how)
        except (ValueError, OSError) as error:
            if name in named:
                raise
            left_out[f"ood {name}"] = str(error)
        else:
            found.append(source if name in named else _optional(source, left_out, team))
    return found


def _optional(source: Outliers, left_out: dict[str, str], team: Team) -> Outliers:
    """The same source, skipped if it cannot be read."""

    def read(num_images: int) -> Any:
        try:
            with team.agreed():
                return source.read(num_images)
        except (ValueError, OSError) as error:
            left_out[f"ood {source.name}"] = str(error)
            return None

    return dataclasses.replace(source, read=read)
