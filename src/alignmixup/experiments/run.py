"""A recipe made into a run: data, network, loader and engine put together, in one folder.

OUT/run.json                 the recipe, every setting; classes and image size; plugins
OUT/ledger.jsonl             one line an epoch
OUT/checkpoint.safetensors   weights, momentum, generators; the one before it is kept, too
OUT/results.jsonl            one line a figure: accuracy at the end, then what ``evaluate`` adds
OUT/adain.safetensors        for style mixing without weights of its own: a small network
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

from torch import nn

from alignmixup import datasets
from alignmixup.contracts import check_draws
from alignmixup.device import pick_device, tensors_on_cpu
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.experiments.accuracies import Evaluator, record_accuracy
from alignmixup.experiments.batches import check_batch_size, shortened, train_batches
from alignmixup.experiments.data_record import DataRecord, Sets, is_named, load_sets
from alignmixup.experiments.load import Run, load_run
from alignmixup.experiments.networks import (
    build_net,
    for_module,
    initialize,
    returns_shares,
)
from alignmixup.experiments.plugins import digests_of, open_recipe, plugins_of, warn_of_edits
from alignmixup.experiments.provenance import provenance
from alignmixup.experiments.run_folder import alone_in, check_folder, check_unused, claim
from alignmixup.experiments.styling import with_style_weights
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.recipes.schema import Recipe, changed, check_record, on_data
from alignmixup.training import TrainSettings, fit, join_team
from alignmixup.training.checkpoint import CHECKPOINT, POSITION, has_checkpoint, read_facts
from alignmixup.training.loggers import Logger, make_loggers
from alignmixup.training.resume import resumed_settings


@tensors_on_cpu
def train(
    recipe: Recipe | str,
    out: Path | str,
    *,
    changes: Mapping[str, object] | None = None,
    data_root: Path | str | None = None,
    sets: Sets | None = None,
    model: nn.Module | None = None,
    init_from: Path | str | None = None,
    extend: bool = False,
    loggers: Sequence[str | Logger] = (),
    quiet: bool = False,
) -> Run:
    """Train a recipe in the folder ``out``, or resume the run in that folder.

    Under torchrun every process calls this and takes its share of each batch.

    Args:
        recipe: A recipe, its name in ``alignmixup recipes``, or ``"my_recipes.py:my_recipe"``: a
            function of your file that returns a ``Recipe``.
        out: Folder of the run.
        changes: Settings to replace, by their names on the command line: ``{"train.epochs": 300}``;
            ``{"data.limit": 500}`` trains on 500 images, under a name that ends in ``-limit500``.
        data_root: Folder of the data sets; defaults to ALIGNMIXUP_DATA, then ``./datasets``.
        sets: Images in memory to use in place of the recipe's data; the run records their name,
            classes and size.
        model: A module of your own in place of the recipe's network; it takes images in [0, 1] and
            returns logits. The run records its class name and is opened with ``model=`` as well.
        init_from: Folder of a run whose weights to start from: those that it was scored with, so
            their average with ``train.ema``. The head is drawn anew where the number of classes
            differs; the normalization is that of the other run.
        extend: Train a finished run in ``out`` for more epochs, with ``train.epochs`` as its new
            length; the schedule is that of the new length.
        loggers: Where values go beside the console and the ledger: names of registered loggers
            ("tensorboard", "trackio", "wandb") or objects.
        quiet: Print nothing.

    Returns:
        The run: ``run.summary`` has last, best and median test accuracy, ``run.model`` the network.

    Raises:
        ValueError: If a setting is not valid, or ``out`` holds a run with other settings.
        FileNotFoundError: If the data are missing.
        Stopped: If Ctrl-C or SIGTERM ended the run; it is saved, and the same call resumes it.

    Example:
        ```python
        from alignmixup.datasets import shapes

        small = {
            "net.width": 4,
            "train.epochs": 1,
            "train.batch_size": 16,
        }
        sets = am.Sets(shapes("train", 32), shapes("test", 32))
        name = "cifar10-r18-alignmixup-fast"
        run = am.train(name, "runs/first", sets=sets, changes=small, quiet=True)
        print(run.summary)
        ```
    """
    _check_arguments(recipe, out, changes, data_root, sets, model)
    recipe = open_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe = changed(recipe, changes or {})
    if sets is not None and not is_named(recipe.data, sets.train.name):
        recipe = on_data(recipe, sets.train.name)
    if model is not None:
        recipe = for_module(recipe, model)
    check_record(recipe)  # now: the run is read again after its last epoch
    requested, recipe = recipe.train, dataclasses.replace(recipe, train=recipe.train.fitted())
    folder, source = Path(out), None if init_from is None else Path(init_from)
    record = check_folder(folder, recipe, extend=extend, init_from=source)
    recipe = record.recipe
    team, device = join_team(pick_device(recipe.train.device))
    with team.guarded():
        if team.is_rank_zero:
            check_unused(folder)
    given = sets or load_sets(recipe.data, data_root, team, device)
    limit = recipe.data.limit
    used = Sets(shortened(given.train, limit), shortened(given.test, limit))
    for _, stage in recipe.stages():
        check_batch_size(stage.train, used.train)
        team.share(stage.train.batch_size, stage.train.accumulate)  # or an error, before any epoch
    images = DataRecord.of(recipe.data, used, is_given=sets is not None)
    quiet = quiet or not team.is_rank_zero
    is_new = not has_checkpoint(folder / CHECKPOINT)
    epoch = 0 if is_new else read_facts(folder / CHECKPOINT, POSITION)["epoch"]
    if not quiet and epoch < recipe.train.epochs:
        for note in _notes(requested, recipe.train):
            print(note)
    # As recorded, and with the precision that a run there has.
    plan = dataclasses.replace(recipe, train=resumed_settings(recipe.train, folder))
    net = build_net(plan, used.train, device, model)
    if is_new:
        plugins = plugins_of(recipe)
        digests = digests_of(plugins)
        record = dataclasses.replace(record, plugins=plugins, plugin_sha256=digests)
        if source is not None:
            begun = initialize(net, source, used.train.num_classes)
            record = dataclasses.replace(record, init_from=begun)
        if not quiet and returns_shares(net, images.image_size):
            print(
                "note: the network returns probabilities (rows that sum to 1), and the loss takes "
                "them for logits: leave its softmax out"
            )
    elif team.is_rank_zero and epoch < recipe.train.epochs:
        warn_of_edits(folder, record.plugin_sha256)
    record = dataclasses.replace(record, images=images)
    stages = _split(plan.stages(), record.extended)
    first = stages[0][1]
    loader = train_batches(first.data, first.train, used.train, device, team)
    notes: dict[str, dict[str, object]] = {"provenance": provenance()}
    effect = first_effect(recipe, net, loader) if is_new else None
    if effect is not None:
        notes["alignment_effect"] = dataclasses.asdict(effect)
        if not quiet and (effect.is_next_to_nothing or not effect.is_exact):
            print(f"note: {effect}")
    about = {"recipe": recipe.to_json()}
    chosen = make_loggers(loggers if team.is_rank_zero else (), folder, quiet=quiet, about=about)
    if isinstance(recipe.mixer, StyleMixer) and recipe.mixer.weights:
        recipe.mixer.network(device)  # or an error that says what is wrong with them
    with team.rank_zero_first():
        if team.is_rank_zero:
            claim(folder, record)  # nothing is missing: the folder is ours now
        mixers = [
            with_style_weights(stage, used.train, folder, device, quiet=quiet)
            for _, stage in stages
        ]
    for (_, stage), mixer in zip(stages, mixers, strict=True):
        check_draws(mixer, stage.train.batch_size)
    if isinstance(mixers[0], StyleMixer):
        notes["style_weights"] = dict(mixers[0].describe())
    evaluate = Evaluator(plan, used.test, device, team)
    try:
        with alone_in(folder) if team.is_rank_zero else nullcontext():
            for (epochs, stage), mixer in zip(stages, mixers, strict=True):
                if epochs.start:
                    loader = train_batches(stage.data, stage.train, used.train, device, team)
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
        if team.is_rank_zero:
            record_accuracy(recipe, folder)
    size = {"num_classes": used.train.num_classes, "image_size": images.image_size}
    return load_run(folder, model=model, device=str(device), **size)


def _split(
    stages: Sequence[tuple[range, Recipe]], ends: Sequence[int]
) -> list[tuple[range, Recipe]]:
    """Split stages where the run has ended before it was extended: each part starts anew."""
    return [
        (range(start, stop), stage)
        for epochs, stage in stages
        for start, stop in pairwise(
            [epochs.start, *(end for end in ends if end in epochs[1:]), epochs.stop]
        )
    ]


def _check_arguments(
    recipe: object, out: object, changes: object, data_root: object, sets: object, model: object
) -> None:
    """Raise for arguments of other types: Python's own errors would come later, and elsewhere."""
    if isinstance(recipe, nn.Module):
        raise ValueError(
            f"recipe must be a Recipe or the name of one, got the module {type(recipe).__name__}: "
            "pass a module of your own as model="
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
            f"sets must be alignmixup.Sets(train, test) of two ImageSets, got {type(sets).__name__}"
        )
    if not isinstance(model, nn.Module | None):
        raise ValueError(f"model must be an nn.Module, got {model!r}")


def _notes(requested: TrainSettings, settings: TrainSettings) -> list[str]:
    """What a short run leaves out of its schedule, in one line each."""
    notes = []
    if requested.warmup_epochs != settings.warmup_epochs:
        notes.append(
            f"note: a warm-up of {requested.warmup_epochs:g} epochs does not fit into "
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
