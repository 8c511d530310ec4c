"""A recipe made into a run: data, network, loader and engine put together, in one folder.

OUT/run.json                 the recipe, every setting; the classes and the size of the images
OUT/ledger.jsonl             one line an epoch
OUT/checkpoint.safetensors   weights, momentum, generators
OUT/results.jsonl            one line a figure: accuracy at the end, then what ``evaluate`` adds
OUT/adain.safetensors        for style mixing without weights of its own: a small network
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from alignmixup import datasets, models
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.datasets.folder import FileSet
from alignmixup.device import compute_for, pick_device
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.evaluation.tasks.accuracy import accuracy
from alignmixup.experiments.batches import (
    check_batch_size,
    eval_batches,
    load_split,
    sample_images,
    shortened,
    side_of,
    train_batches,
)
from alignmixup.experiments.data_record import DataRecord, is_named
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import (
    ADAIN,
    RESULTS,
    alone_in,
    append_results,
    check_folder,
    claim,
    read_data_record,
    read_recipe,
    whole_lines,
)
from alignmixup.mixers import AlignMixup, AlignMixupAE, StyleCutMix, StyleMix
from alignmixup.recipes.catalogue import find_recipe
from alignmixup.recipes.schema import Recipe, changed, on_data
from alignmixup.training import Summary, TrainSettings, fit, join_team, summarise
from alignmixup.training.adain_fit import fit_adain
from alignmixup.training.checkpoint import CHECKPOINT, load_weights
from alignmixup.training.ledger import LEDGER
from alignmixup.training.loggers import Logger, make_loggers
from alignmixup.training.resume import resumed_settings

__all__ = ["ADAIN", "Run", "Sets", "build_net", "open_run", "pick_device", "train"]

ADAIN_STEPS = 4000
ADAIN_IMAGES = 5000


@dataclass(frozen=True)
class Sets:
    """The two splits a run needs."""

    train: ImageSet
    test: ImageSet

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            value = getattr(self, name)
            if not isinstance(value, ImageSet | FileSet):
                raise ValueError(f"{name} must be an ImageSet, got {type(value).__name__}")
        if self.train.class_names != self.test.class_names:
            raise ValueError(
                f"the two sets must have the same classes; {self.train.name}/{self.train.split} "
                f"has {self.train.num_classes}, {self.test.name}/{self.test.split} has "
                f"{self.test.num_classes}, or others"
            )


@dataclass(frozen=True)
class Run:
    """A trained run, read back: its recipe, its network with the weights of the last checkpoint.

    ``data`` has the classes, the image size and the normalization; None of an older version's run.
    """

    recipe: Recipe
    net: nn.Module
    epoch: int
    folder: Path
    data: DataRecord | None = None


def train(
    recipe: Recipe | str,
    out: Path | str,
    *,
    changes: Mapping[str, object] | None = None,
    data_root: Path | str | None = None,
    sets: Sets | None = None,
    loggers: Sequence[str | Logger] = (),
    quiet: bool = False,
) -> Summary:
    """Train a recipe in the folder ``out``, or resume the run in that folder.

    Under torchrun every process calls this and takes its share of each batch.

    Args:
        recipe: A recipe, or its name in ``alignmixup recipes``.
        out: Folder of the run.
        changes: Settings to replace, by their names on the command line: ``{"train.epochs": 300}``;
            ``{"data.limit": 500}`` trains on 500 images, under a name that ends in ``-limit500``.
        data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.
        sets: Images in memory to use in place of the recipe's data; the run records their name,
            classes and size.
        loggers: Where values go beside the console and the ledger: names of registered loggers
            ("tensorboard", "trackio", "wandb") or objects.
        quiet: Print nothing.

    Returns:
        Last, best and median test accuracy, and whether the run is complete.

    Raises:
        ValueError: If a setting is not valid, or ``out`` holds a run with other settings.
        FileNotFoundError: If the data are missing.
        Stopped: If Ctrl-C or SIGTERM ended the run; it is saved, and the same call resumes it.

    Example:
        ```python
        from alignmixup.datasets import shapes
        from alignmixup.experiments.run import Sets

        small = {
            "net.width": 4,
            "train.epochs": 1,
            "train.batch_size": 16,
        }
        sets = Sets(shapes("train", 32), shapes("test", 32))
        name = "cifar10-r18-alignmixup-fast"
        print(am.train(name, "runs/first", sets=sets, changes=small, quiet=True))
        ```
    """
    _check_arguments(recipe, out, changes, data_root, sets)
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe = changed(recipe, changes or {})
    if sets is not None and not is_named(recipe.data, sets.train.name):
        recipe = on_data(recipe, sets.train.name)
    asked, recipe = recipe.train, dataclasses.replace(recipe, train=recipe.train.fitted())
    folder = Path(out)
    recipe = check_folder(folder, recipe)
    team, device = join_team(pick_device(recipe.train.device))
    limit = recipe.data.limit
    with team.leader_first():  # rank 0 decodes, the others read what it has decoded
        given = sets or Sets(
            *(load_split(recipe.data, split, data_root) for split in ("train", "test"))  # type: ignore[arg-type]
        )
    train_set, test_set = shortened(given.train, limit), shortened(given.test, limit)
    check_batch_size(recipe.train, train_set)
    record = DataRecord.of(recipe.data, train_set, test_set, is_given=sets is not None)
    quiet = quiet or not team.is_leader
    if not quiet:
        for note in _notes(asked, recipe.train):
            print(note)
    # As recorded, and with the precision that a run there has.
    plan = dataclasses.replace(recipe, train=resumed_settings(recipe.train, folder))
    net = build_net(plan, train_set, device)
    stages = plan.stages()
    first = stages[0][1]
    loader = train_batches(first.data, first.train, train_set, device, team)
    notes: dict[str, dict[str, object]] = {"provenance": provenance()}
    effect = first_effect(recipe, net, loader)
    if effect is not None:
        notes["alignment_effect"] = dataclasses.asdict(effect)
        if not quiet and (effect.is_next_to_nothing or not effect.is_exact):
            print(f"note: {effect}")
    about = {"recipe": recipe.to_json()}
    chosen = make_loggers(loggers if team.is_leader else (), folder, quiet=quiet, about=about)
    if isinstance(recipe.mixer, StyleMix | StyleCutMix) and recipe.mixer.weights:
        recipe.mixer.network(device)  # or an error that says what is wrong with them
    with team.leader_first():
        if team.is_leader:
            claim(folder, recipe, record)  # nothing is missing: the folder is ours now
        mixers = [with_style_weights(stage, train_set, folder, device) for _, stage in stages]
    if isinstance(mixers[0], StyleMix | StyleCutMix):
        notes["style_weights"] = dict(mixers[0].describe())
    evaluate = _Evaluator(plan, test_set, device)
    try:
        with alone_in(folder) if team.is_leader else nullcontext():
            for (epochs, stage), mixer in zip(stages, mixers, strict=True):
                if epochs.start:
                    loader = train_batches(stage.data, stage.train, train_set, device, team)
                fit(
                    net,
                    mixer,
                    loader,
                    evaluate,
                    stage.train,
                    folder,
                    notes=notes,
                    loggers=[chosen],
                    quiet=quiet,
                    team=team,
                    epochs=epochs,
                )
    finally:
        if team.is_leader:
            _record_accuracy(recipe, folder)
    return summarise(folder)


def _check_arguments(
    recipe: object, out: object, changes: object, data_root: object, sets: object
) -> None:
    """Raise for arguments of other types: Python's own errors would come later, and elsewhere."""
    if isinstance(recipe, nn.Module):
        raise ValueError(
            f"recipe must be a Recipe or the name of one, got the module {type(recipe).__name__}: "
            "train a module of your own with mixer(model, x, y).loss() in your loop, or name it in "
            "a recipe as net.name 'timm:NAME'"
        )
    if not isinstance(recipe, Recipe | str):
        raise ValueError(f"recipe must be a Recipe or the name of one, got {recipe!r}")
    for name, path in (("out", out), ("data_root", data_root or ".")):
        if not isinstance(path, str | Path) or not str(path):
            raise ValueError(f"{name} must be the path of a folder, got {path!r}")
    if not isinstance(changes, Mapping | None):
        raise ValueError(f'changes must be a dict such as {{"train.epochs": 300}}, got {changes!r}')
    if not isinstance(sets, Sets | None):
        raise ValueError(
            "sets must be alignmixup.experiments.run.Sets(train, test) of two ImageSets, got "
            f"{type(sets).__name__}"
        )


def _notes(asked: TrainSettings, settings: TrainSettings) -> list[str]:
    """What a short run leaves out of its schedule, in one line each."""
    notes = []
    if asked.warmup_epochs != settings.warmup_epochs:
        notes.append(
            f"note: a warm-up of {asked.warmup_epochs:g} epochs does not fit into "
            f"{settings.epochs}: it is cut to {settings.warmup_epochs:g}"
        )
    late = [epoch for epoch in settings.milestones if epoch >= settings.epochs]
    if settings.schedule == "step" and late:
        notes.append(
            f"note: of the milestones at which the rate falls, {late} lie beyond the last epoch, "
            f"{settings.epochs}: set --train.milestones or --train.schedule cosine for a short run"
        )
    if settings.points and settings.points[-1][0] > settings.epochs:
        notes.append(
            f"note: the learning rate ends at epoch {settings.points[-1][0]:g}, this run at "
            f"{settings.epochs}: set --train.points for a short run"
        )
    return notes


def open_run(
    folder: Path | str,
    num_classes: int | None = None,
    image_size: int | None = None,
    device: str = "auto",
) -> Run:
    """Read a run back: its recipe and its network with the last checkpoint's weights.

    Args:
        folder: Folder of the run.
        num_classes: Needed for a run of an older version alone, which did not record it.
        image_size: The same.
        device: Where to put the network; auto: a GPU if there is one.
    """
    place = Path(folder)
    recipe, data = read_recipe(place), read_data_record(place)
    if data is not None:
        num_classes = num_classes or len(data.class_names)
        image_size = image_size or data.image_size
    if num_classes is None or image_size is None:
        raise ValueError(
            f"{place} was begun by a version that recorded no classes: pass num_classes and "
            "image_size"
        )
    settings = recipe.train
    spec = dataclasses.replace(recipe.net, pretrained=False)  # the checkpoint has all weights
    net = models.build(spec, num_classes, (0.0,) * 3, (1.0,) * 3, image_size, seed=settings.seed)
    facts = load_weights(net, place / CHECKPOINT)  # the normalization is among the weights
    net.to(pick_device(device))
    return Run(recipe, net.eval(), int(str(facts["epoch"])), place, data)


def build_net(recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> nn.Module:
    """Build the recipe's network for these images, on ``device`` and in its memory layout."""
    size = side_of(recipe.data, images)
    net = models.build(
        recipe.net, images.num_classes, images.mean, images.std, size, seed=recipe.train.seed
    )
    is_last = compute_for(recipe.train, device).channels_last
    layout = torch.channels_last if is_last else torch.preserve_format
    return net.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def first_effect(
    recipe: Recipe, net: nn.Module, loader: datasets.DeviceLoader | datasets.StreamLoader
) -> Effect | None:
    """How much alignment changes on the first batch, where the method aligns."""
    mixer = recipe.mixer
    if not isinstance(mixer, AlignMixup | AlignMixupAE) or mixer.feature_mixer is None:
        return None
    if loader.batch_size < 2:  # nobody to align with
        return None
    x, _ = next(loader.epoch(0))
    return alignment_effect(net, mixer, x[:64])


def with_style_weights(
    recipe: Recipe, images: ImageSet | FileSet, folder: Path, device: torch.device
) -> Mixer:
    """Give a style mixer that names no weights a small network trained on these images.

    It is made once and kept in the run's folder; any other mixer comes back as it is.
    """
    mixer, seed = recipe.mixer, recipe.train.seed
    if not isinstance(mixer, StyleMix | StyleCutMix) or mixer.weights:
        return mixer
    path = folder / ADAIN
    if not path.exists():
        needs_distances = isinstance(mixer, StyleCutMix) and mixer.gamma == "auto"
        some = _style_images(recipe, images)
        partial = path.with_name("partial-" + ADAIN)
        fit_adain(some, partial, ADAIN_STEPS, seed, device, class_distances=needs_distances)
        os.replace(partial, path)
    return dataclasses.replace(mixer, weights=str(path))


def _style_images(recipe: Recipe, images: ImageSet | FileSet) -> ImageSet:
    """What a style network is trained on: a set in memory, or so many of its files."""
    if isinstance(images, ImageSet):
        return images
    count = max(ADAIN_IMAGES, images.num_classes)
    return sample_images(images, count, side_of(recipe.data, images), recipe.train.seed)


class _Evaluator:
    """Top-1 on the test set, in the precision of training."""

    def __init__(self, recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> None:
        self._batches = eval_batches(recipe.data, recipe.train, images, device)
        precision = compute_for(recipe.train, device).precision
        self._amp = torch.bfloat16 if precision == "bf16" else None

    def __call__(self, net: nn.Module) -> dict[str, float]:
        results = accuracy(net, self._batches, amp_dtype=self._amp)
        return {r.metric: r.value for r in results if r.metric in ("top1", "top5")}


def _record_accuracy(recipe: Recipe, folder: Path) -> None:
    """Append best, last and median of the last ten of a complete run, each once."""
    if not (folder / LEDGER).exists() or not (summary := summarise(folder)).is_complete:
        return
    where = origin(recipe, summary.epochs, folder)
    there = whole_lines(folder / RESULTS)
    figures = {
        "top1_median10": summary.median10,
        "top1_last": summary.last,
        "top1_best": summary.best,
    }
    append_results(
        folder,
        [
            Result("accuracy", metric, value).stamped(**where, **provenance())
            for metric, value in figures.items()
            if value is not None and f'"metric": "{metric}"'.encode() not in there
        ],
    )
