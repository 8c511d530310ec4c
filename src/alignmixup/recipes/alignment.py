"""The alignment study: does alignment matter, and which part of it? CIFAR-100, PreActResNet-18.

    alignmixup sweep 'cifar100-*-study-*' --seeds 0 1 2      eight settings, three seeds

All have the draws of the authors' code (the input is mixed in half of the steps) and the short
schedule with 200 epochs. The first four differ in the plan alone, before a pooled head:

    unaligned            position by position
    exact                our default: the marginal is exact that preserves the mean, so that the
                         logits are those of ``unaligned``
    released             the authors' order: columns last in both directions
    converged            the same with ten times the iterations

``layer3`` mixes one stage earlier, at 8 x 8 positions, and the network ``r18-flatten`` has a head
that reads every position; there alignment changes the logits with an exact plan as well. Each is
compared with its own ``unaligned``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from alignmixup.contracts import RecipeKey
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.recipes.classification import CIFAR, NETWORKS, both_schedules
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import register_recipe

DATA = "cifar100"
RELEASED = AlignMixup.released("layer4")
EXACT = dataclasses.replace(RELEASED, last=None)
UNALIGNED = dataclasses.replace(EXACT, aligned=False)

# By network: the mixer of each arm.
ARMS = {
    "r18": {
        "unaligned": UNALIGNED,
        "exact": EXACT,
        "released": RELEASED,
        "converged": dataclasses.replace(RELEASED, num_iters=1000),
        "layer3-unaligned": dataclasses.replace(UNALIGNED, layer="layer3"),
        "layer3-exact": dataclasses.replace(EXACT, layer="layer3"),
    },
    "r18-flatten": {"unaligned": UNALIGNED, "exact": EXACT},
}


@register_recipe
def alignment_study() -> Iterator[Recipe]:
    """Every arm of the study, on the short schedule with 200 epochs."""
    for network, arms in ARMS.items():
        net, _ = NETWORKS[network]
        for arm, mixer in arms.items():
            key = RecipeKey(DATA, network, "alignmixup").labeled("study", arm)
            _, fast = both_schedules(Recipe(key, DataSpec(DATA), net, mixer, CIFAR))
            settings = dataclasses.replace(fast.train, epochs=200)
            yield dataclasses.replace(fast, key=key, train=settings)
