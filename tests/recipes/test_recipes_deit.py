"""Recipes of DeiT-S and LeViT: one schedule, the published figures beside them."""

import dataclasses

import pytest
import torch

from alignmixup.mixers.oneof import OneOf
from alignmixup.mixers.tokenmix import TokenMix
from alignmixup.mixers.transmix import TransMix
from alignmixup.models.zoo import build
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.report.others import quoted_beside
from torchvision_schemas import define_torchvision_schemas

NAMES = recipe_names("imagenet-deit-s-*")


def test_they_differ_in_the_mixer_alone():
    baseline = find_recipe("imagenet-deit-s-baseline")
    assert len(NAMES) == 14
    for name in NAMES:
        recipe = find_recipe(name)
        assert dataclasses.replace(baseline, key=recipe.key, mixer=recipe.mixer) == recipe
    settings = baseline.train
    assert (settings.optimizer, settings.lr, settings.batch_size) == ("adamw", 1e-3, 1024)
    assert settings.lr == pytest.approx(5e-4 * settings.batch_size / 512)


def test_augmentation_is_that_of_deit_and_levit():
    deit, levit = (find_recipe(f"imagenet-{n}-cutmix") for n in ("deit-s", "levit-128s"))
    assert deit.data == levit.data
    data = deit.data
    assert (data.rand_augment, data.erasing, data.repeats) == (9.0, 0.25, 3)
    assert (data.jitter, data.lighting) == (0.0, 0.0)  # RandAugment takes their place
    assert (deit.net.drop_path, levit.net.drop_path) == (0.1, 0.0)
    shared = dataclasses.replace(deit.train, epochs=100, weight_decay=0.025)
    assert shared == levit.train


@pytest.mark.slow
def test_learned_methods_read_a_block_in_the_middle(timm):
    for method in ("automix", "samix"):
        recipe = find_recipe(f"imagenet-deit-s-{method}")
        net = build(recipe.net, 10, (0.5,) * 3, (0.25,) * 3, 32).eval()
        mixer = recipe.mixer.attach(net, torch.rand(2, 3, 32, 32))
        mixed = mixer(net, torch.rand(2, 3, 32, 32), torch.arange(2))
        assert mixed.loss().isfinite()
        assert recipe.mixer.optimizer_group["lr"] == recipe.train.lr == 1e-3


@pytest.fixture
def timm():
    define_torchvision_schemas()
    return pytest.importorskip("timm")


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
        ("resizemix", [78.61]),
        ("fmix", [77.37]),
        ("automix", [80.78]),
        ("samix", [80.94]),
    ],
)
def test_published_figures_stand_beside_them(method, figures):
    found = quoted_beside(find_recipe(f"imagenet-deit-s-{method}").key)
    assert [figure.top1 for figure in found] == figures
    assert method in ("oneof", "resizemix") or found[0].note  # not what the name says
