"""What alignment changes before pooled and flattened heads and embeddings, in trained networks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from alignmixup.contracts import RecipeKey, Result
from alignmixup.evaluation.effect import Effect, alignment_effect
from alignmixup.experiments import built_in
from alignmixup.experiments.built_in import small_recipe, train_built_in, write_lines
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.effect import EFFECT_CAPTION, draw_effects
from alignmixup.figures.sources import floats
from alignmixup.figures.style import save
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import Recipe
from alignmixup.training import summarize

NUM_IMAGES = 64


@register_figure("heads", about="what alignment changes before pooled and flattened heads")
def heads(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Train four small networks on shapes and draw what alignment changes in each of them."""
    if run is not None:
        raise ValueError(f"heads trains its own networks: leave out the run {run}, or see 'effect'")
    small = built_in.BUILT_IN
    sets = small.sets(small.head_images)
    found: dict[str, list[Effect]] = {}
    results = []
    for title, (recipe, layers) in _networks(small, seed).items():
        found[title], top1 = _measured_effects(recipe, out, sets, layers)
        where = {**origin(recipe, small.head_epochs), **provenance()}
        settings = {"network": title, "num_images": NUM_IMAGES, "top1": top1}
        results += [
            Result(
                "alignment_effect", part, getattr(effect, part), {"layer": effect.layer, **settings}
            ).stamped(**where)
            for effect in found[title]
            for part in ("features", "pooled", "logits", "plan_entropy", "marginal_error")
        ]
    lines = write_lines(results, out / "heads.jsonl")
    length = f"{small.head_epochs} epochs on {small.head_images} shapes"
    caption = (
        f"What alignment changes in small trained networks, {length}, on {NUM_IMAGES} test images: "
        "the relative change of features, of their mean over positions and of the logits, and the "
        f"entropy of the plans. {EFFECT_CAPTION}"
    )
    figure = draw_effects(found, "What alignment changes in small trained networks")
    return [*save(figure, out / "heads", caption), lines]


def _measured_effects(
    recipe: Recipe, out: Path, sets: Sets, layers: Sequence[str]
) -> tuple[list[Effect], float | None]:
    """Train, or take what is trained; the effect at each layer, and the last test accuracy."""
    print(f"{recipe.name}:", file=sys.stderr)
    folder = train_built_in(recipe, out, sets)
    x = floats(sets.test, list(range(min(NUM_IMAGES, len(sets.test)))))
    net = load_run(folder, device="cpu").model
    return [alignment_effect(net, layer, x) for layer in layers], summarize(folder).last


def _networks(small: built_in.BuiltIn, seed: int) -> dict[str, tuple[Recipe, tuple[str, str]]]:
    """How each network is trained, and the layers it is looked at."""
    plain, inner = ("layer3", "layer4"), ("encoder.layer3", "encoder")
    net = NetSpec("preact_resnet18", width=small.width)
    pooled, flat = (replace(net, autoencoder=kind) for kind in ("pooled", "vector"))
    key = RecipeKey("shapes", "r18", "alignmixup")
    ae = replace(key, method="alignmixup-ae")
    flat_key, flat_head = replace(key, network="r18-flatten"), replace(net, head="flatten")
    made = partial(small_recipe, epochs=small.head_epochs, seed=seed)
    return {
        "pooled head": (made(key, net, AlignMixup()), plain),
        "flattened head": (made(flat_key, flat_head, AlignMixup()), plain),
        "AE pooled f": (made(ae.labeled("pooled"), pooled, AlignMixupAE()), inner),
        "AE flattened f": (made(ae, flat, AlignMixupAE()), inner),
    }
