"""The arms of the alignment study differ in their plan, or in one layer, and nothing else."""

import dataclasses

import pytest
import torch

from alignmixup.evaluation.effect import alignment_effect
from alignmixup.models.zoo import build
from alignmixup.recipes.alignment import ARMS, alignment_study
from alignmixup.recipes.catalog import matching_recipes

RECIPES = {(recipe.key.network, recipe.key.variant): recipe for recipe in alignment_study()}


def test_the_pattern_of_the_docs_names_all_arms():
    assert len(matching_recipes("cifar100-*-study-*")) == len(RECIPES) == 8


@pytest.mark.parametrize("network", ARMS)
def test_arms_differ_in_nothing_but_the_plan_and_the_layer(network):
    plan = {"aligned": True, "last": None, "num_iters": 100, "layer": "layer4"}
    chosen = [recipe for (name, _), recipe in RECIPES.items() if name == network]
    same = {repr((r.net, r.data, r.train, dataclasses.replace(r.mixer, **plan))) for r in chosen}
    assert len(same) == 1
    assert len({repr(recipe.mixer) for recipe in chosen}) == len(chosen)


@pytest.mark.parametrize(
    ("arm", "changes"),
    [("exact", False), ("released", True), ("layer3-exact", True)],
)
def test_what_an_arm_changes_of_the_logits(arm, changes):
    recipe = RECIPES["r18", f"study-{arm}"]
    spec = dataclasses.replace(recipe.net, width=4)
    net = build(spec, 5, (0.5,) * 3, (0.25,) * 3, image_size=32).double()
    x = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    effect = alignment_effect(net.eval(), recipe.mixer, x)
    assert (max(change.logits for change in effect.changes) > 1e-6) == changes
