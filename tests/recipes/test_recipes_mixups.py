"""Recipes of the methods beyond the paper: the settings of others but for the mixer."""

import dataclasses

import pytest

from alignmixup.datasets import shapes
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import Sets, train
from alignmixup.mixers.fmix import FMix
from alignmixup.mixers.gridmix import GridMix
from alignmixup.mixers.nomix import NoMix
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.mixups import METHODS, Entry, mixups
from alignmixup.report.others import quoted_beside
from alignmixup.training.ledger import LEDGER, read_ledger

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


def test_the_dense_form_has_no_figures_of_the_other():
    assert quoted_beside(find_recipe("cifar100-r18-multimix").key)[0].top1 == 81.82
    assert not quoted_beside(find_recipe("cifar100-r18-densemultimix").key)


def test_gridmix_of_cells_has_its_local_loss_and_no_figures_of_holes():
    recipe = find_recipe("cifar100-r18-gridmix-cells")
    assert recipe.mixer == GridMix("cells", local_weight=1.0)
    assert not quoted_beside(recipe.key)
    assert quoted_beside(find_recipe("cifar100-r18-gridmix").key)


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


def test_mixing_ends_at_its_share_of_training_and_the_run_opens_again(tmp_path):
    recipe = find_recipe("cifar10-r18-oneof").shrunk()
    mixer = dataclasses.replace(recipe.mixer, until=0.5)
    settings = dataclasses.replace(recipe.train, epochs=2)
    recipe = dataclasses.replace(recipe, mixer=mixer, train=settings)
    sets = Sets(shapes("train", 12), shapes("test", 4))
    train(recipe, tmp_path / "run", sets=sets, quiet=True)
    events = read_ledger(tmp_path / "run" / LEDGER)
    first, second = (event for event in events if "loss" in event)
    assert sum(first["cases"].values()) == sum(second["cases"].values()) == 3
    assert "clean" not in {case for case, count in first["cases"].items() if count}
    assert {case for case, count in second["cases"].items() if count} == {"clean"}
    assert load_run(tmp_path / "run").recipe.mixer == mixer
