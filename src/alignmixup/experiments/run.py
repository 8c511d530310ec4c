"""A recipe made into a run: data, network, loader and engine put together, in one folder.

OUT/run.json                 the recipe, every setting
OUT/ledger.jsonl             one line an epoch
OUT/checkpoint.safetensors   weights, momentum, generators
OUT/results.jsonl            one line a figure: accuracy at the end, then what ``evaluate`` adds
OUT/adain.safetensors        for style mixing without weights of its own: a small network
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alignmixup import datasets, models
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.datasets.folder import FileSet
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.evaluation.tasks.accuracy import accuracy
from alignmixup.experiments.batches import (
    eval_batches,
    load_split,
    sample_images,
    side_of,
    train_batches,
)
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run_folder import (
    RESULTS,
    alone_in,
    append_results,
    check_folder,
    claim,
    read_recipe,
    whole_lines,
)
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.recipes.catalogue import find_recipe
from alignmixup.recipes.schema import Recipe, changed
from alignmixup.training import Summary, fit, join_team
from alignmixup.training.adain_fit import fit_adain
from alignmixup.training.checkpoint import load_weights
from alignmixup.training.trainer import CHECKPOINT

__all__ = ["ADAIN", "Run", "Sets", "build_net", "open_run", "pick_device", "train"]

ADAIN = "adain.safetensors"
ADAIN_STEPS = 4000
ADAIN_IMAGES = 5000


@dataclass(frozen=True)
class Sets:
    """The two splits a run needs."""

    train: ImageSet
    test: ImageSet


@dataclass(frozen=True)
class Run:
    """A trained run, read back: its recipe, its network with the weights of the last checkpoint."""

    recipe: Recipe
    net: nn.Module
    epoch: int
    folder: Path


def train(
    recipe: Recipe | str,
    out: Path | str,
    *,
    changes: Mapping[str, object] | None = None,
    data_root: Path | str | None = None,
    sets: Sets | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
) -> Summary:
    """Train a recipe in the folder ``out``, or resume the run in that folder.

    Under torchrun every process calls this and takes its share of each batch.

    Args:
        recipe: A recipe, or its name in ``alignmixup recipes``.
        out: Folder of the run.
        changes: Settings to replace, by their names on the command line: ``{"train.epochs": 300}``.
        data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.
        sets: Images in memory to use in place of the recipe's data.
        tensorboard: Write TensorBoard files as well.
        quiet: Print nothing.

    Returns:
        Last, best and median test accuracy, and whether the run is complete.

    Raises:
        ValueError: If a setting is not valid, or ``out`` holds a run with other settings.
        FileNotFoundError: If the data are missing.

    Example:
        ```python
        from alignmixup.datasets import shapes
        from alignmixup.experiments.run import Sets

        small = {
            "net.width": 4,
            "train.epochs": 1,
            "train.warmup_epochs": 0.0,
            "train.batch_size": 16,
            "train.precision": "float32",
            "train.compile": False,
        }
        sets = Sets(shapes("train", 32), shapes("test", 32))
        name = "cifar10-r18-alignmixup-fast"
        print(am.train(name, "runs/first", sets=sets, changes=small, quiet=True))
        ```
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe = changed(recipe, changes or {})
    folder = Path(out)
    check_folder(folder, recipe)
    team, device = join_team(pick_device(recipe.train.device))
    with team.leader_first():  # it decodes, the others read what it has decoded
        train_set = sets.train if sets else load_split(recipe.data, "train", data_root)
        test_set = sets.test if sets else load_split(recipe.data, "test", data_root)
    net = build_net(recipe, train_set, device)
    settings, stages = recipe.train, recipe.stages()
    loader = train_batches(stages[0][1].data, stages[0][1].train, train_set, device, team)
    quiet = quiet or not team.is_leader
    notes: dict[str, dict[str, object]] = {"provenance": provenance()}
    effect = first_effect(recipe, net, loader)
    if effect is not None:
        notes["alignment_effect"] = dataclasses.asdict(effect)
        if not quiet and (effect.is_next_to_nothing or not effect.is_exact):
            print(f"note: {effect}")
    late = [epoch for epoch in settings.milestones if epoch >= settings.epochs]
    if settings.schedule == "step" and late and not quiet:
        print(
            f"note: of the milestones at which the rate falls, {late} lie beyond the last epoch, "
            f"{settings.epochs}: set --train.milestones or --train.schedule cosine for a short run"
        )
    if settings.points and settings.points[-1][0] > settings.epochs and not quiet:
        print(
            f"note: the learning rate ends at epoch {settings.points[-1][0]:g}, this run at "
            f"{settings.epochs}: set --train.points for a short run"
        )
    writer = _tensorboard(folder) if tensorboard and team.is_leader else None
    if isinstance(recipe.mixer, StyleMix | StyleCutMix) and recipe.mixer.weights:
        recipe.mixer.network(device)  # or an error that says what is wrong with them
    with team.leader_first():
        claim(folder, recipe)  # nothing that can be missing is missing: the folder is ours now
        mixer = with_style_weights(recipe, train_set, folder, device)
        mixers = [with_style_weights(stage, train_set, folder, device) for _, stage in stages]
    if isinstance(mixer, StyleMix | StyleCutMix):
        notes["style_weights"] = dict(mixer.describe())
    with alone_in(folder) if team.is_leader else nullcontext():
        for (epochs, stage), mixer in zip(stages, mixers, strict=True):
            if epochs.start:
                loader = train_batches(stage.data, stage.train, train_set, device, team)
            summary = fit(
                net,
                mixer,
                loader,
                _Evaluator(recipe, test_set, device),
                stage.train,
                folder,
                notes=notes,
                writer=writer,
                quiet=quiet,
                team=team,
                epochs=epochs,
            )
            if summary.epochs < epochs.stop:  # stopped by a signal
                break
    if summary.is_complete and team.is_leader:
        _record_accuracy(folder, origin(recipe, summary.epochs, folder), summary)
    return summary


def open_run(folder: Path | str, num_classes: int, image_size: int, device: str = "auto") -> Run:
    """Read a run back: its recipe and its network with the last checkpoint's weights."""
    place = Path(folder)
    recipe = read_recipe(place)
    settings = recipe.train
    spec = dataclasses.replace(recipe.net, pretrained=False)  # the checkpoint has all weights
    net = models.build(spec, num_classes, (0.0,) * 3, (1.0,) * 3, image_size, seed=settings.seed)
    facts = load_weights(net, place / CHECKPOINT)  # the normalisation is among the weights
    net.to(pick_device(device))
    return Run(recipe, net.eval(), int(str(facts["epoch"])), place)


def build_net(recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> nn.Module:
    """Build the recipe's network for these images, on ``device`` and in its memory layout."""
    size = side_of(recipe.data, images)
    net = models.build(
        recipe.net, images.num_classes, images.mean, images.std, size, seed=recipe.train.seed
    )
    # On the CPU never: convolutions of narrow channels_last networks crash there (torch 2.13).
    is_last = recipe.train.channels_last and device.type == "cuda"
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


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda, cuda:1 or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no GPU; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device {name!r} was asked for; the GPUs are cuda:0 to cuda:{count - 1}")
    return device


class _Evaluator:
    """Top-1 on the test set, in the precision of training."""

    def __init__(self, recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> None:
        self._batches = eval_batches(recipe.data, recipe.train, images, device)
        self._amp = torch.bfloat16 if recipe.train.precision == "bf16" else None

    def __call__(self, net: nn.Module) -> dict[str, float]:
        results = accuracy(net, self._batches, amp_dtype=self._amp)
        return {r.metric: r.value for r in results if r.metric in ("top1", "top5")}


def _record_accuracy(folder: Path, where: Mapping[str, object], summary: Summary) -> None:
    """Append best, last and, if the run is long enough, median of the last ten, each once."""
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


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "TensorBoard is not installed: pip install 'alignmixup[logging]'"
        ) from None
    return SummaryWriter(folder / "tensorboard")
