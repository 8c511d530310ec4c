"""Recipes of the methods beyond the paper: the settings of others but for the mixer."""

import dataclasses

import pytest

from alignmixup.mixers.fmix import FMix
from alignmixup.mixers.nomix import NoMix
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.mixups import METHODS, Entry, mixups

DATA = ("cifar10", "cifar100", "tiny")


@pytest.mark.parametrize("data", DATA)
def test_they_differ_from_the_baseline_in_the_mixer_alone(data):
    for method, variant in METHODS:
        for suffix in ("", "-fast"):
            name = "-".join(part for part in (data, "r18", method, variant) if part) + suffix
            recipe = find_recipe(name)
            baseline = find_recipe(f"{data}-r18-baseline{suffix}")
            assert (recipe.key.method, type(recipe.mixer)) != ("baseline", NoMix)
            assert dataclasses.replace(baseline, key=recipe.key, mixer=recipe.mixer) == recipe


def test_settings_are_those_of_the_data():
    alphas = [find_recipe(f"{data}-r18-regmixup").mixer.alpha for data in DATA]
    assert alphas == [20.0, 10.0, 10.0]
    assert find_recipe("cifar100-r18-fmix").mixer == FMix()
    assert find_recipe("cifar100-r18-fmix-released").mixer == FMix.released()
    assert find_recipe("tiny-r18-oneof-fast").mixer.smoothing == 0.1


def test_presets_that_repeat_a_defect_are_variants():
    """No recipe without a variant trains on wrong labels or masks."""
    for (method, variant), entry in METHODS.items():
        mixer = entry.make("cifar10")
        is_defective = (
            getattr(mixer, "labels", "shown") == "swapped"
            or getattr(mixer, "spectrum", "") == "released"
        )
        assert is_defective == (variant in ("released", "openmixup")), method


def test_a_method_may_have_training_settings_of_its_own(monkeypatch):
    monkeypatch.setitem(METHODS, ("own", ""), Entry(lambda data: NoMix(), {"lr": 0.05}))
    made = {recipe.name: recipe for recipe in mixups()}
    assert made["cifar10-r18-own-fast"].train.lr == 0.05
    assert made["cifar10-r18-fmix-fast"].train.lr == 0.1
    assert "cifar10-r18-own" not in recipe_names()
