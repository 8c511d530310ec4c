"""Recipes of DeiT-S: one schedule, the published figures beside them."""

import dataclasses

import pytest

from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.report.others import quoted_beside

NAMES = recipe_names("imagenet-deit-s-*")


def test_they_differ_in_the_mixer_alone():
    baseline = find_recipe("imagenet-deit-s-baseline")
    assert len(NAMES) == 8
    for name in NAMES:
        recipe = find_recipe(name)
        assert dataclasses.replace(baseline, key=recipe.key, mixer=recipe.mixer) == recipe
    settings = baseline.train
    assert (settings.optimizer, settings.lr, settings.batch_size) == ("adamw", 1e-3, 1024)
    assert settings.lr == pytest.approx(5e-4 * settings.batch_size / 512)


def test_transformers_switch_with_input_mixup():
    mixers = {n: find_recipe(f"imagenet-deit-s-{n}").mixer for n in ("oneof", "transmix")}
    assert mixers["oneof"] == OneOf.deit()
    assert mixers["transmix"] == TransMix.released()
    assert find_recipe("imagenet-deit-s-transmix-intended").mixer == TransMix.intended()
    assert find_recipe("imagenet-deit-s-tokenmix").mixer == TokenMix.released()
    for name in ("oneof", "transmix", "tokenmix"):
        mixer = find_recipe(f"imagenet-deit-s-{name}").mixer
        assert any(case.endswith("/input") for case in mixer.cases)


@pytest.mark.parametrize(
    ("method", "figures"),
    [
        ("oneof", [79.80]),
        ("transmix", [80.68]),
        ("tokenmix", [80.80, 80.8]),
        ("attentivemix-self", [80.32]),
    ],
)
def test_published_figures_stand_beside_them(method, figures):
    found = quoted_beside(find_recipe(f"imagenet-deit-s-{method}").key)
    assert [figure.top1 for figure in found] == figures
    assert method == "oneof" or found[0].note  # not what the name says
