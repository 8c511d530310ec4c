"""Figures that measure what alignment does on the built-in shapes, with their JSON lines.

pose    whether pose follows the kept image and appearance the other (see ``pose``)
heads   what alignment changes before pooled and flattened heads and embeddings
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from alignmixup import datasets
from alignmixup.contracts import Mixer, Result
from alignmixup.evaluation.effect import NEXT_TO_NOTHING, Effect, alignment_effect
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import DecodedSource, decoded_source, small_recipe, write_lines
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run import Sets, open_run, train
from alignmixup.figures import drawing as figures, drawing_decoded as drawing, pose as posing
from alignmixup.figures.gallery import different_pairs, floats, shown
from alignmixup.mixers import AlignMixup, AlignMixupAE
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import Recipe

__all__ = ["heads", "pose"]

NUM_EXAMPLES, NUM_PAIRS, NUM_EFFECT_IMAGES = 6, 250, 64


def pose(
    out: Path,
    *,
    run: Path | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    num_pairs: int = NUM_PAIRS,
) -> list[Path]:
    """Measure pose and appearance of decoded mixes of shapes, draw them, write them as JSON lines.

    Of a run on shapes, where both are known; with any other data it is an error.
    """
    source = decoded_source(out, run, seed, data_root)
    if source.recipe.data.name != "shapes":
        raise ValueError(
            "pose and appearance are known for the built-in shapes alone, and this run's data are "
            f"{source.recipe.data.name}: train one with --dataset shapes"
        )
    images = source.images
    truth = datasets.draw_shapes(images.split, len(images), images.images.shape[-1])
    points = posing.pose_points(
        source.painter,
        truth,
        num_pairs=num_pairs,
        seed=seed,
        eps=source.eps,
        num_iters=source.num_iters,
    )
    settings = {"layer": source.painter.layer, "num_pairs": num_pairs, "pair_seed": seed}
    results = [r.stamped(**source.where()) for r in posing.pose_results(points, settings)]
    lines = write_lines(results, out / "pose.jsonl")
    figure = drawing.pose_ways(
        [_way(points, plan) for plan in posing.PLANS],
        _examples(source, truth, seed),
        f"Pose and appearance of decoded mixes: {source.what}",
        "Right: nothing of the kept image's features is left (share 0), carried by each plan.",
    )
    return [*figures.save(figure, out / "pose"), lines]


def _way(points: Sequence[posing.PosePoint], plan: str) -> drawing.Way:
    way = sorted((p for p in points if p.plan == plan), key=lambda p: -p.kept_share)
    return drawing.Way(
        plan,
        tuple(p.kept_share for p in way),
        tuple(p.appearance for p in way),
        tuple(p.pose for p in way),
    )


@torch.no_grad()
def _examples(
    source: DecodedSource, truth: datasets.ShapesDrawing, seed: int
) -> dict[str, list[figures.Image]]:
    """Kept and other images, both decoded, and the other's features carried over by each plan."""
    pairs = different_pairs(truth.image_set, NUM_EXAMPLES, seed)
    chosen = [*(i for i, _ in pairs), *(j for _, j in pairs)]
    painter, n = source.painter, len(pairs)
    device = next(painter.net.parameters()).device
    x = floats(truth.image_set, chosen).to(device)
    masks = truth.truth.masks[chosen].to(device)
    features, perm = painter.features(x), torch.arange(2 * n, device=device).roll(n)
    columns = {"kept": x, "other": x[perm], "kept,\ndecoded": painter.paint(features)}
    names = {"unaligned": "other,\ndecoded"}
    for plan in posing.PLANS:
        R = posing.assignment(
            *(features, perm, plan, masks),
            eps=source.eps,
            num_iters=source.num_iters,
            seed=seed,
        )
        columns[names.get(plan, plan)] = painter.paint(posing.carried(features, perm, R))
    order = ["kept", "other", "kept,\ndecoded", "other,\ndecoded", *posing.PLANS]
    return {
        name: [shown(image) for image in columns[name][:n]] for name in order if name in columns
    }


def heads(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Train four small networks on shapes and draw what alignment changes in each of them."""
    if run is not None:
        raise ValueError(f"heads trains its own networks: leave out the run {run}, or see 'effect'")
    small = built_in.BUILT_IN
    sets = small.sets(small.head_images)
    found: dict[str, list[figures.LayerEffect]] = {}
    results = []
    for title, network in _networks().items():
        name = title.replace(" ", "-").lower()
        recipe = small_recipe(name, network.net, network.mixer, small.head_epochs, seed)
        effects, top1 = _measured_effects(
            recipe, out / f"heads-seed{seed}" / name, sets, network.layers
        )
        found[title] = [_layer_effect(effect) for effect in effects]
        where = {**origin(recipe, small.head_epochs), **provenance()}
        settings = {"network": title, "num_images": NUM_EFFECT_IMAGES, "top1": top1}
        results += [
            Result(
                "alignment_effect", part, getattr(effect, part), {"layer": effect.layer, **settings}
            ).stamped(**where)
            for effect in effects
            for part in ("features", "pooled", "logits", "plan_entropy", "marginal_error")
        ]
    lines = write_lines(results, out / "heads.jsonl")
    note = f"{small.head_epochs} epochs on {small.head_images} shapes; dashed: next to nothing"
    figure = figures.effect_by_layer(
        found, "What alignment changes in small trained networks", NEXT_TO_NOTHING, note
    )
    return [*figures.save(figure, out / "heads"), lines]


def _measured_effects(
    recipe: Recipe, folder: Path, sets: Sets, layers: Sequence[str]
) -> tuple[list[Effect], float | None]:
    """Train in ``folder``, or go on; the effect at each layer, and the last test accuracy."""
    print(f"{recipe.name}, in {folder}:", file=sys.stderr)
    summary = train(recipe, folder, sets=sets)
    if not summary.is_complete:
        raise ValueError(f"the training in {folder} was stopped: run again to go on")
    x = floats(sets.test, list(range(min(NUM_EFFECT_IMAGES, len(sets.test)))))
    net = open_run(folder, sets.test.num_classes, x.shape[-1], device="cpu").net
    return [alignment_effect(net, layer, x) for layer in layers], summary.last


@dataclass(frozen=True)
class _Network:
    """One network of ``heads``: how it is made and trained, and where it is looked at."""

    net: NetSpec
    mixer: Mixer
    layers: tuple[str, ...]


def _networks() -> dict[str, _Network]:
    plain, inner = ("layer3", "layer4"), ("encoder.layer3", "encoder")
    net = NetSpec("preact_resnet18", width=built_in.BUILT_IN.width)
    return {
        "pooled head": _Network(net, AlignMixup(), plain),
        "flattened head": _Network(replace(net, head="flatten"), AlignMixup(), plain),
        "AE pooled f": _Network(replace(net, autoencoder="pooled"), AlignMixupAE(), inner),
        "AE flattened f": _Network(replace(net, autoencoder="vector"), AlignMixupAE(), inner),
    }


def _layer_effect(effect: Effect) -> figures.LayerEffect:
    return figures.LayerEffect(
        effect.layer, effect.features, effect.pooled, effect.logits, effect.plan_entropy
    )
