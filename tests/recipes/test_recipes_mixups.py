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
from alignmixup.recipes.mixups import IMAGENET, METHODS, Entry, mixups
from alignmixup.recipes.schema import changed
from alignmixup.report.others import QUOTED, quoted_beside
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.optim import learning_rate_share

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


@pytest.mark.parametrize(("method", "variant"), IMAGENET)
def test_on_imagenet_they_differ_from_the_baseline_in_the_mixer_and_have_a_figure(method, variant):
    recipe = find_recipe("-".join(filter(None, ("imagenet-r50", method, variant))))
    baseline = find_recipe("imagenet-r50-baseline")
    assert dataclasses.replace(baseline, key=recipe.key, mixer=recipe.mixer) == recipe
    assert quoted_beside(recipe.key)


def test_every_quoted_figure_stands_beside_a_recipe():
    """But for transformers on CIFAR-100 at 224 pixels, and WRN28-10, which we do not have."""
    keys = (find_recipe(name).key for name in recipe_names())
    places = {(key.data, key.network, key.method) for key in keys}
    left = {(q.data, q.network) for q in QUOTED if (q.data, q.network, q.method) not in places}
    assert left == {("cifar100", "deit-s"), ("cifar10", "wrn28-10"), ("cifar100", "wrn28-10")}


def test_snapmix_has_its_authors_schedule():
    recipe = find_recipe("cub200-r50-snapmix")
    settings, data = recipe.train, recipe.data
    assert (settings.epochs, settings.milestones) == (200, (80, 150, 180))
    assert (settings.lr, settings.classifier_lr, settings.batch_size) == (0.001, 0.01, 16)
    assert (settings.nesterov, settings.weight_decay) == (True, 1e-4)
    assert (data.image_size, data.resize, data.squash) == (448, 512, False)
    assert (recipe.mixer.alpha, recipe.mixer.prob, recipe.net.pretrained) == (5.0, 1.0, True)
    assert [figure.top1 for figure in quoted_beside(recipe.key)] == [87.75]


def test_two_hundred_epochs_of_the_fast_schedule_are_a_whole_cosine():
    methods = ("baseline", "input", "cutmix", "alignmixup", *(m for m, v in METHODS if not v))
    for method in methods:
        recipe = find_recipe(f"cifar100-r18-{method}-fast")
        settings = changed(recipe, {"train.epochs": 200}).train
        shares = [learning_rate_share(settings, epoch) for epoch in (0.0, 100.0, 200.0)]
        assert shares == pytest.approx([1.0, 0.5, 0.0], abs=1e-9)
        assert (settings.lr, settings.weight_decay, settings.batch_size) == (0.1, 5e-4, 128)


@pytest.mark.parametrize(
    "method", ["baseline", "input", "cutmix", "manifold", "alignmixup", "alignmixup-ae"]
)
def test_the_papers_optimizer_for_300_epochs(method):
    """That of 2,000 epochs with its milestones scaled, and no other difference."""
    long, short = (find_recipe(f"cifar100-r18-{method}{suffix}") for suffix in ("", "-300"))
    scaled = dataclasses.replace(long.train, epochs=300, milestones=(75, 150, 225))
    assert dataclasses.replace(long, key=short.key, train=scaled) == short
    settings = short.train
    assert (settings.optimizer, settings.lr, settings.momentum) == ("sgd", 0.1, 0.9)
    assert (settings.weight_decay, settings.decay, settings.batch_size) == (1e-4, 0.1, 128)
    assert (settings.nesterov, settings.warmup_epochs, settings.ema) == (False, 0.0, None)
    assert settings.clip_norm == (1.0 if method == "alignmixup-ae" else None)


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
