"""What ``evaluate`` scores: a run with its own test images, or a user's module."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from alignmixup.contracts import ImageSet, RecipeKey
from alignmixup.datasets.folder import BoxedFileSet, FileSet
from alignmixup.datasets.loading.box_lists import boxes_in_view
from alignmixup.datasets.loading.layout import PATH_PREFIXES, path_and_size
from alignmixup.datasets.loading.view import shown_fraction
from alignmixup.device import pick_device
from alignmixup.evaluation.evaluate import evaluate
from alignmixup.evaluation.forward import ALONE, Batches, model_device
from alignmixup.evaluation.shares import share_of
from alignmixup.evaluation.subject import EvalImages, Subject, import_plugins_of, open_subject
from alignmixup.evaluation.task_options import task_names
from alignmixup.experiments.batches import eval_batches, load_split, shortened, side_of
from alignmixup.experiments.data_record import check_classes, own_test_set
from alignmixup.experiments.load import Run, load_run
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import ADAIN, RUN, append_results, read_run
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.recipes.schema import Recipe, on_data
from alignmixup.training import Team, join_team

__all__ = ["evaluate", "join_processes", "other_images", "run_images", "task_names"]


NOT_DRAWN = "draw figures of a run on data that load by name, such as folder:PATH"


def join_processes(device: str) -> tuple[Team, str]:
    """Return the processes that torchrun started, if it did, and the device of this one."""
    team, own = join_team(pick_device(device))
    return team, str(own)


@open_subject.register(nn.Module)
def _of_module(
    run: nn.Module,
    images: Any,
    data_root: Path | str | None,
    device: str,
    model: nn.Module | None = None,
    team: Team = ALONE,
) -> Subject:
    if images is None:
        raise ValueError("a module is scored on images: pass an ImageSet, or batches (x, y)")
    model = run if device == "auto" else run.to(pick_device(device))
    place = model_device(model) or torch.device("cpu")
    name = getattr(images, "name", None)  # that of a tensor is None
    key = RecipeKey(name if isinstance(name, str) else "unknown", type(run).__name__, "unknown")
    return Subject(model, images, {"key": key, **provenance(place)})


@import_plugins_of.register(str)
@import_plugins_of.register(Path)
def _import_plugins(run: Path | str) -> None:
    if (Path(run) / RUN).exists():
        read_run(Path(run))


@open_subject.register(str)
@open_subject.register(Path)
@open_subject.register(Run)
def _of_run(
    run: Run | Path | str,
    images: Any,
    data_root: Path | str | None,
    device: str,
    model: nn.Module | None = None,
    team: Team = ALONE,
) -> Subject:
    folder = run.folder if isinstance(run, Run) else Path(run)
    there = read_run(folder)
    recipe, record = there.recipe, there.images
    is_given = images is not None
    own = images
    if not is_given:
        place = pick_device(device)
        own = own_test_set(folder, recipe.data, record, data_root, team=team, device=place)
    if not isinstance(own, ImageSet | FileSet):
        raise ValueError("a run is scored on an ImageSet, which has the names of the classes")
    check_classes(folder, record, own, is_given=is_given, warns=team.is_rank_zero)
    if not isinstance(run, Run):
        size = side_of(recipe.data, own)
        run = load_run(
            folder, model=model, num_classes=own.num_classes, image_size=size, device=device
        )
    elif device != "auto":
        run.model.to(pick_device(device))
    mixer = recipe.mixer
    if isinstance(mixer, StyleMixer) and not mixer.weights:
        mixer = dataclasses.replace(mixer, weights=str(folder / ADAIN))
    place = model_device(run.model) or torch.device("cpu")
    facts = origin(recipe, run.epoch, folder)
    settings = {}
    if run.has_clean_statistics:
        facts["trained"] = {**cast(dict[str, object], facts["trained"]), "statistics": "clean"}
        settings["clean_batches"] = run.clean_batches
    return Subject(
        run.model,
        own if isinstance(own, ImageSet) else _streamed(recipe, own, place),
        {**facts, **provenance(place)},
        mixer,
        partial(append_results, folder),
        settings,
    )


def _streamed(recipe: Recipe, files: FileSet, device: torch.device) -> EvalImages:
    """The files of a run that streams them, as they are evaluated in training."""
    spec = recipe.data
    size = side_of(spec, files)
    boxes = None
    if isinstance(files, BoxedFileSet):
        fraction = shown_fraction(size, spec.eval_resize)
        boxes = boxes_in_view(files.boxes, files.paths, size, fraction, squash=spec.squash)

    def of(team: Team) -> Batches:
        return eval_batches(spec, recipe.train, share_of(files, team), device)

    return EvalImages(of(ALONE), files.name, (3, size, size), len(files), boxes, of)


def run_images(folder: Path, root: Path | str | None, most: int = 1000) -> ImageSet:
    """Return a run's own test images as it is evaluated on them, for pictures of it.

    Of images that stream, at most ``most`` are decoded, in equal shares of all classes.
    """
    there = read_run(folder)
    recipe = there.recipe
    own = own_test_set(folder, recipe.data, there.images, root, remedy=NOT_DRAWN)
    check_classes(folder, there.images, own, is_given=False)
    if isinstance(own, ImageSet):
        return own
    files = shortened(own, most)
    streamed = _streamed(recipe, files, torch.device("cpu"))
    pixels = torch.cat([(255 * x).round().byte() for x, _ in streamed.batches])
    return files.in_memory(pixels, None if streamed.boxes is None else tuple(streamed.boxes))


def other_images(
    run: Path | str, dataset: str, root: Path | str | None, team: Team, device: str
) -> ImageSet | FileSet:
    """Load the test split of other data, prepared as the run's own images.

    A folder or shards named without a size have that of the run, and fill the square as its images
    do, whether they stream or not.

    Raises:
        ValueError: Another size is named, and the run streams its images.
    """
    there = read_run(Path(run))
    own = there.recipe.data
    prefix = next((p for p in PATH_PREFIXES if dataset.startswith(p)), None)
    if prefix is not None and there.images is not None:
        size, own_size = path_and_size(dataset, prefix)[1], there.images.image_size
        if size is None:
            dataset = f"{dataset}@{own_size}"
        elif own.stream and size != own_size:
            raise ValueError(
                f"a run that streams its images is scored at their size, {own_size}: leave @{size} "
                f"out of {dataset}"
            )
    spec = dataclasses.replace(on_data(there.recipe, dataset).data, limit=None, stream=own.stream)
    return load_split(spec, "test", root, team, device)
