"""The ablation table and the table of Sinkhorn iterations: CIFAR-100, PreActResNet-18.

    alignmixup train ablation-cifar100-ae-xAe                  mixed layers {x, A, e}, aligned
    alignmixup train ablation-cifar100-ae-xAe-unaligned        its unaligned twin
    alignmixup train ablation-cifar100-iterations-10           AlignMixup with ten iterations

A name has the architecture (``plain``: no decoder; ``ae``; ``vae``) and the set of mixed layers in
the letters of the paper: x, A, e, E, with A2, A4, A8 at a stated resolution, ``musigma`` and
``MSigma`` for the pairs of the variational form. A set of vectors has nothing to align: one row,
without a suffix. The sets {x} are not in the paper; they are there to compare with.

``plain`` sets without e or E, and the rows of iterations, have the pooled head of AlignMixup's
headline row, before which an exact plan changes no logits (docs/alignment.md).

Every name has a ``-fast`` twin on the short schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from alignmixup.contracts import Mixer
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.base import Layer, cases_of
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.classification import CIFAR, METHODS, NETWORKS, both_schedules
from alignmixup.recipes.schema import DataSpec, Recipe, Row
from alignmixup.report import paper

__all__ = ["ablation"]

DATA = "cifar100"
NET, LAYER = NETWORKS["r18"]
PREFIX = f"ablation-{DATA}"

# The first rows of the table: what the ablations are held against.
COMPETITORS = ("baseline", "manifold", "stylecutmix")

# Layer sets as report/paper.py writes them, by architecture.
LAYER_SETS = {
    "plain": ("x", "x-e", "A", "e", "x-A", "x-A-E", "x-A-e"),
    "ae": ("x", "x-e", "A", "e", "x-A", "x-E", "x-A-e", "x-A2-e", "x-A4-e", "x-A8-e"),
    "vae": ("x", "x-musigma", "x-A", "x-MSigma", "x-A-musigma"),
}
METHOD = {"plain": "alignmixup", "ae": "alignmixup-ae", "vae": "alignmixup-vae"}
# What a symbol stands for among the mixers' layers, where it is not one of them itself.
LAYERS: dict[str, Layer] = {"A2": "A", "A4": "A", "A8": "A", "musigma": "e", "MSigma": "E"}
# A is 4 x 4 as it is: 2 x 2 by averaging, 8 x 8 by leaving out the last down-sampling. Both are
# the network's: A has that size in every case and in evaluation.
MAP_SIZE = {"A2": 2}
LAST_STRIDE = {"A8": 1}

ITERATIONS = (0, 10, 20, 50, 100, 200, 500, 1000)


def ablation() -> Iterator[Row]:
    """Every row of the two tables, on the paper's schedule and on the short one."""
    for method in COMPETITORS:
        printed = paper.cell(table="ablation", method=method)
        yield from both_schedules(_recipe(method, NET, METHODS[method](DATA, LAYER)), printed)
    for arch, sets in LAYER_SETS.items():
        for symbols in sets:
            for aligned in (True, False) if _has_positions(symbols) else (False,):
                yield from _layer_set(arch, symbols, aligned)
    for num_iters in ITERATIONS:
        recipe = _recipe(f"iterations-{num_iters}", NET, AlignMixup(LAYER, num_iters=num_iters))
        printed = paper.cell(table="iterations", num_iters=num_iters)
        yield from both_schedules(recipe, printed)


def _recipe(name: str, net: NetSpec, mixer: Mixer) -> Recipe:
    return Recipe(f"{PREFIX}-{name}", DataSpec(DATA), net, mixer, CIFAR)


def _has_positions(symbols: str) -> bool:
    """Whether one of the layers is a tensor, which can be aligned."""
    return bool({"A", "E"} & set(_layers(symbols)))


def _layers(symbols: str) -> tuple[Layer, ...]:
    return tuple(LAYERS.get(symbol, cast(Layer, symbol)) for symbol in symbols.split("-"))


def _layer_set(arch: str, symbols: str, aligned: bool) -> Iterator[Row]:
    twin = "-unaligned" if _has_positions(symbols) and not aligned else ""
    name = f"{arch}-{symbols.replace('-', '')}{twin}"
    printed = paper.cell(table="ablation", method=METHOD[arch], layers=symbols, aligned=aligned)
    recipe = _recipe(name, _net(arch, symbols), _mixer(arch, symbols, aligned))
    yield from both_schedules(recipe, printed)


def _is_autoencoder(arch: str, symbols: str) -> bool:
    """Whether the network has an embedding f; AlignMixup has one only where its output is mixed."""
    return arch != "plain" or bool({"e", "E"} & set(_layers(symbols)))


def _net(arch: str, symbols: str) -> NetSpec:
    if not _is_autoencoder(arch, symbols):
        return NET
    return NetSpec(
        NET.name,
        autoencoder="tensor" if "E" in _layers(symbols) else "vector",
        variational=arch == "vae",
        decoder=arch != "plain",
        last_stride=_setting(LAST_STRIDE, symbols),
        map_size=_setting(MAP_SIZE, symbols),
    )


def _mixer(arch: str, symbols: str, aligned: bool) -> Mixer:
    layers = _layers(symbols)
    if not _is_autoencoder(arch, symbols):
        weights = dict.fromkeys(cases_of(layers, clean=False), 1.0)
        return AlignMixup(LAYER, weights=weights, aligned=aligned)
    kind = AlignMixupVAE if arch == "vae" else AlignMixupAE
    return kind(layers=layers, clean=arch != "plain", aligned=aligned)


def _setting(of_symbol: dict[str, int], symbols: str) -> int | None:
    """What the table says of one of these symbols, if anything."""
    return next((of_symbol[s] for s in symbols.split("-") if s in of_symbol), None)
