"""The ablation table and the table of Sinkhorn iterations: CIFAR-100, PreActResNet-18.

    alignmixup train cifar100-r18-alignmixup-ae-xAe              mixed layers {x, A, e}, aligned
    alignmixup train cifar100-r18-alignmixup-ae-xAe-unaligned    the same, unaligned
    alignmixup train cifar100-r18-alignmixup-iterations10        AlignMixup with ten iterations

The variant has the set of mixed layers in the letters of the paper: x, A, e, E, with A2, A4, A8 at
a stated resolution, ``musigma`` and ``MSigma`` for the pairs of the variational form. A set of
vectors has nothing to align: one row, without ``-unaligned``. The sets {x} are not in the paper;
they are for comparison. The first rows of the table are recipes of the classification table.

Sets of AlignMixup without e or E, and the rows of iterations, have the pooled head of its headline
row, before which an exact plan changes no logits (docs/alignment.md).

Every name has a ``-fast`` variant with a short schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from alignmixup.contracts import Mixer, RecipeKey
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.layer_sets import Layer, cases_of
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.classification import CIFAR, NETWORKS, both_schedules
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import register_recipe

DATA = "cifar100"
NET, LAYER = NETWORKS["r18"]

# Layer sets as report/paper.py writes them, by method.
LAYER_SETS = {
    "alignmixup": ("x", "x-e", "A", "e", "x-A", "x-A-E", "x-A-e"),
    "alignmixup-ae": ("x", "x-e", "A", "e", "x-A", "x-E", "x-A-e", "x-A2-e", "x-A4-e", "x-A8-e"),
    "alignmixup-vae": ("x", "x-musigma", "x-A", "x-MSigma", "x-A-musigma"),
}
# The mixers' layer of a symbol, where their names differ.
LAYERS: dict[str, Layer] = {"A2": "A", "A4": "A", "A8": "A", "musigma": "e", "MSigma": "E"}
# A is 4 x 4 as it is: 2 x 2 by averaging, 8 x 8 by leaving out the last down-sampling. Both are
# the network's: A has that size in every case and in evaluation.
MAP_SIZE = {"A2": 2}
LAST_STRIDE = {"A8": 1}

ITERATIONS = (0, 10, 20, 50, 100, 200, 500, 1000)


@register_recipe
def ablation() -> Iterator[Recipe]:
    """Every row of the two tables, on the paper's schedule and on the short one."""
    for method, sets in LAYER_SETS.items():
        for symbols in sets:
            for aligned in (True, False) if _has_positions(symbols) else (False,):
                variant = "unaligned" if _has_positions(symbols) and not aligned else ""
                key = RecipeKey(DATA, "r18", method).labeled(symbols.replace("-", ""), variant)
                net, mixer = _net(method, symbols), _mixer(method, symbols, aligned)
                yield from both_schedules(Recipe(key, DataSpec(DATA), net, mixer, CIFAR))
    for num_iters in ITERATIONS:
        key = RecipeKey(DATA, "r18", "alignmixup", f"iterations{num_iters}")
        mixer = AlignMixup(LAYER, num_iters=num_iters)
        yield from both_schedules(Recipe(key, DataSpec(DATA), NET, mixer, CIFAR))


def _has_positions(symbols: str) -> bool:
    """Whether one of the layers is a tensor, which can be aligned."""
    return bool({"A", "E"} & set(_layers(symbols)))


def _layers(symbols: str) -> tuple[Layer, ...]:
    return tuple(LAYERS.get(symbol, cast(Layer, symbol)) for symbol in symbols.split("-"))


def _is_autoencoder(method: str, symbols: str) -> bool:
    """Whether the network has an embedding f; AlignMixup has one only where its output is mixed."""
    return method != "alignmixup" or bool({"e", "E"} & set(_layers(symbols)))


def _net(method: str, symbols: str) -> NetSpec:
    if not _is_autoencoder(method, symbols):
        return NET
    return NetSpec(
        NET.name,
        autoencoder="tensor" if "E" in _layers(symbols) else "vector",
        variational=method == "alignmixup-vae",
        decoder=method != "alignmixup",
        last_stride=_setting(LAST_STRIDE, symbols),
        map_size=_setting(MAP_SIZE, symbols),
    )


def _mixer(method: str, symbols: str, aligned: bool) -> Mixer:
    layers = _layers(symbols)
    if not _is_autoencoder(method, symbols):
        weights = dict.fromkeys(cases_of(layers, clean=False), 1.0)
        return AlignMixup(LAYER, weights=weights, aligned=aligned)
    kind = AlignMixupVAE if method == "alignmixup-vae" else AlignMixupAE
    return kind(layers=layers, clean=method != "alignmixup", aligned=aligned)


def _setting(of_symbol: dict[str, int], symbols: str) -> int | None:
    """Return the setting of one of these symbols, if any has one."""
    return next((of_symbol[s] for s in symbols.split("-") if s in of_symbol), None)
