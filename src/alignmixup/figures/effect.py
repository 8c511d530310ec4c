"""What alignment changes, layer by layer, and how far its plans are from a matching."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignmixup.evaluation.effect import NEXT_TO_NOTHING, Effect, alignment_effect
from alignmixup.experiments.painters import features_at
from alignmixup.figures.by_name import register_figure
from alignmixup.figures.sources import Source, floats, network_source
from alignmixup.figures.style import BLUE, GREEN, VERMILLION, Figure, new_figure, save, write_title
from alignmixup.models.preact_resnet import HeadKind
from alignmixup.ops.align import to_positions

NUM_IMAGES = 8
MOST_POSITIONS = 1024  # plans of more positions take minutes on a CPU
HEADS: tuple[HeadKind, ...] = ("pool", "flatten")
# Color and marker of each measure.
PARTS = {"features": (BLUE, "o"), "pooled": (VERMILLION, "s"), "logits": (GREEN, "^")}
SMALLEST = 1e-9  # foot of the axis of changes: below what float32 can tell
MOST_LETTERS = 45  # names of layers side by side under a column of a figure
EFFECT_CAPTION = (
    f"Below the dashed line a change is next to nothing; zeros are drawn at {SMALLEST:g}. Plan "
    "entropy: 0 is a matching, 1 a plan that knows nothing."
)


@register_figure("effect", about="what alignment changes, layer by layer")
def effect(
    out: Path, *, run: Path | None = None, seed: int = 0, data_root: Path | None = None
) -> list[Path]:
    """Draw what alignment changes at each layer, and how far its plans are from matching."""
    heads = HEADS if run is None else HEADS[:1]  # a run has the head it was trained with
    sources = [network_source(run, seed, data_root, head=head) for head in heads]
    networks, left_out = {}, []
    for source in sources:
        networks[source.what], skipped = layer_effects(source, seed)
        left_out += [name for name in skipped if name not in left_out]
    caption = (
        f"What alignment changes, by layer, on {NUM_IMAGES} images of {sources[0].images.name}: "
        f"the relative change of features, of their mean over positions and of the logits, and the "
        f"entropy of the plans. {EFFECT_CAPTION} Networks: {'; '.join(networks)}."
    )
    if left_out:
        caption += f" Left out, with more than {MOST_POSITIONS} positions: {', '.join(left_out)}."
    figure = draw_effects(networks, "What alignment changes, by layer")
    return save(figure, out / "effect", caption)


def layer_effects(source: Source, seed: int = 0) -> tuple[list[Effect], list[str]]:
    """The effect at each stage of the network, and the stages too large to measure."""
    stages = [
        name for name, _ in source.net.named_modules() if re.fullmatch(r"(\w+\.)?layer\d", name)
    ]
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(source.images), generator=rng)[:NUM_IMAGES].tolist()
    x = floats(source.images, chosen).to(next(source.net.parameters()).device)
    measured, left_out = [], []
    maps: list[Tensor] = []
    for layer in dict.fromkeys([*stages, source.layer]):
        A = features_at(source.net, layer, x[:1])
        if any(torch.equal(A, other) for other in maps):
            continue  # one map by two names, as an autoencoder's encoder and its last stage
        maps.append(A)
        if to_positions(A).shape[1] > MOST_POSITIONS:
            left_out.append(layer)
            continue
        how = {"eps": source.eps, "num_iters": source.num_iters}
        measured.append(alignment_effect(source.net, layer, x, **how))  # type: ignore[arg-type]
    return measured, left_out


def draw_effects(networks: Mapping[str, Sequence[Effect]], title: str) -> Figure:
    """One column a network: the three changes by layer on a log scale, below the plans' entropy.

    A dashed line says where next to nothing begins. What is zero is drawn at the foot of the axis.
    """
    widths = [max(2.7, 1.2 * len(effects)) for effects in networks.values()]
    figure = new_figure(max(6.4, sum(widths)), 5.6)
    grid = figure.subplots(2, len(networks), squeeze=False, sharey="row", height_ratios=(2, 1))
    for column, (name, effects) in enumerate(networks.items()):
        where = np.arange(len(effects))
        top, bottom = grid[0, column], grid[1, column]
        for k, (part, (color, marker)) in enumerate(PARTS.items()):
            values = [max(getattr(each, part), SMALLEST) for each in effects]
            label = "mean over positions" if part == "pooled" else part
            dots = {"color": color, "marker": marker, "markersize": 7, "linestyle": "none"}
            # Dots: a bar's length means nothing on an axis without a zero.
            top.plot(where + 0.15 * (k - 1), values, label=label, **dots)
        top.axhline(NEXT_TO_NOTHING, color="0.3", linewidth=0.8, linestyle="--")
        top.set_yscale("log")
        top.set_ylim(SMALLEST, 10)
        top.set_title(name)
        bottom.bar(where, [each.plan_entropy for each in effects], 0.5, color="0.5")
        bottom.set(ylim=(0, 1), xlim=top.set_xlim(-0.5, len(effects) - 0.5))
        for axes in (top, bottom):
            _name_layers(axes, [each.layer for each in effects])
            axes.grid(axis="y")
    grid[0, 0].set_ylabel("|aligned - unaligned| / |unaligned|")
    grid[1, 0].set_ylabel("plan entropy\n(0 matched, 1 not)")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return write_title(figure, title)


def _name_layers(axes: Any, layers: Sequence[str]) -> None:
    """Names below the bars, without the module they all lie in, slanted where they would touch."""
    owners = {layer.rpartition(".")[0] for layer in layers}
    if len(owners) == 1:
        layers = [layer.rpartition(".")[2] for layer in layers]
    axes.set_xticks(np.arange(len(layers)), layers)
    if max(map(len, layers), default=0) * len(layers) > MOST_LETTERS:
        for name in axes.get_xticklabels():
            name.set(rotation=20, horizontalalignment="right")
