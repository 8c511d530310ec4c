"""The localization table: its settings, and a run on a small CUB from training to boxes."""

import dataclasses
from functools import partial

import pytest
import torch

from alignmixup import datasets, models
from alignmixup.contracts import Result
from alignmixup.datasets import find
from alignmixup.datasets.cub import load_cub, scan_cub
from alignmixup.datasets.loading.box_lists import boxes_in_view
from alignmixup.experiments.batches import load_split, train_batches
from alignmixup.experiments.run import train
from alignmixup.experiments.scoring import evaluate
from alignmixup.models.zoo import build
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.schema import Recipe, changed
from alignmixup.registry import DATASETS
from alignmixup.report.paper import cell_beside
from alignmixup.report.tables import table
from alignmixup.training.optim import make_optimizer
from cub_folder import LAYOUT, make_cub

# SnapMix has a schedule of its own.
NAMES = [name for name in recipe_names("cub200-*") if "snapmix" not in name]


def test_the_table_is_whole_and_has_its_published_figures():
    methods = ("baseline", "input", "cutout", "cutmix", "alignmixup", "alignmixup-unaligned", "adl")
    assert set(NAMES) == {
        *(f"cub200-{net}-{method}" for net in ("vgg", "r50") for method in methods),
        "cub200-vgg-acol",
    }
    cells = {name: cell_beside(find_recipe(name).key, "top1_loc") for name in NAMES}
    printed = {name: cell and cell.value for name, cell in cells.items()}
    assert printed["cub200-vgg-baseline"] == 37.1
    assert printed["cub200-r50-alignmixup"] == 56.2
    assert printed["cub200-vgg-acol"] == 45.9
    assert printed["cub200-r50-adl"] is None
    assert printed["cub200-vgg-cutout"] == 45.8
    assert printed["cub200-r50-alignmixup-unaligned"] is None


@pytest.mark.parametrize(
    ("network", "lr", "classifier_lr"), [("vgg", 1e-4, 1e-3), ("r50", 1e-3, 1e-2)]
)
def test_settings_are_those_of_the_appendix(network, lr, classifier_lr):
    recipe = find_recipe(f"cub200-{network}-alignmixup")
    settings, spec = recipe.train, recipe.data
    assert (settings.lr, settings.classifier_lr) == (lr, classifier_lr)
    assert (settings.epochs, settings.batch_size, settings.momentum) == (600, 16, 0.9)
    assert (settings.milestones, settings.decay) == ((150, 300, 450), 0.1)
    assert (settings.weight_decay, settings.nesterov, settings.warmup_epochs) == (1e-4, False, 0)
    assert (spec.resize, spec.image_size, spec.eval_resize, spec.squash) == (256, 224, 224, True)
    assert recipe.net.pretrained
    assert (recipe.mixer.alpha, recipe.mixer.eps, recipe.mixer.num_iters) == (2.0, 0.1, 100)


@pytest.mark.parametrize("name", NAMES)
def test_the_classifier_has_its_own_rate_and_maps_are_14_by_14(name):
    recipe = find_recipe(name)
    small = recipe.shrunk()
    net = build(small.net, 200, (0.5,) * 3, (0.2,) * 3, 224, seed=0)
    groups = make_optimizer(net, recipe.train).param_groups
    rates = {id(p): float(g["lr"]) for g in groups for p in g["params"]}
    fast = {n for n, p in net.named_parameters() if rates[id(p)] > recipe.train.lr * 5}
    ends = ("branch_a.", "branch_b.") if name.endswith("acol") else ("head.",)
    assert fast == {n for n, _ in net.named_parameters() if n.startswith(ends)}
    assert fast
    with torch.no_grad():
        if name.endswith("acol"):
            _, maps = net.eval().class_maps(torch.rand(1, 3, 224, 224), None)
        else:
            seen = []
            layer = net.get_submodule(models.default_tap(small.net, net))
            layer.register_forward_hook(lambda _, given, out: seen.append(out))
            net.eval()(torch.rand(1, 3, 224, 224))
            maps = seen[0]
    assert maps.shape[-2:] == (14, 14)


@pytest.fixture
def root(tmp_path, monkeypatch):
    make_cub(tmp_path)
    small = dataclasses.replace(
        find("cub200"),
        function=partial(load_cub, layout=LAYOUT),
        scan=partial(scan_cub, layout=LAYOUT),
    )
    monkeypatch.setitem(DATASETS._entries, "cub200", small)
    return tmp_path


def test_images_are_squashed_and_cropped_in_training(root):
    recipe = find_recipe("cub200-r50-baseline").shrunk()
    files = load_split(recipe.data, "train", root)
    ((x, y),) = train_batches(recipe.data, recipe.train, files, torch.device("cpu")).epoch(0)
    assert x.shape == (4, 3, 224, 224)
    whole = {int(i): load_cub(root, "train", 256, LAYOUT).images[i] / 255 for i in range(4)}
    for image, label in zip(x, y, strict=True):
        windows = [
            candidate[:, top : top + 224, left : left + 224].flip(-1) if mirrored else
            candidate[:, top : top + 224, left : left + 224]
            for candidate in whole.values()
            for mirrored in (False, True)
            for top in range(0, 33, 4)
            for left in range(0, 33, 4)
        ]  # fmt: skip
        # Every window has a neighbor on this grid two pixels off at most: nearly the same image.
        nearest = min(float((w - image).abs().mean()) for w in windows)
        assert nearest < 0.03, int(label)


@pytest.mark.parametrize("name", ["cub200-vgg-acol", "cub200-r50-adl", "cub200-vgg-alignmixup"])
def test_a_run_goes_from_files_to_localized_birds(name, root):
    small = {"data.image_size": 64, "data.resize": 72, "data.eval_resize": 64}
    recipe = changed(find_recipe(name).shrunk(), {**small, "train.seed": 3})
    assert Recipe.from_json(recipe.to_json()) == recipe
    train(recipe, root / "run", data_root=root, quiet=True)
    done = evaluate(root / "run", tasks=["accuracy", "localization"], data_root=root, device="cpu")
    assert done.left_out == {}
    assert done.results[0].key.name == name
    # The same as from images in memory, where boxes are scaled with them.
    images = datasets.load_cub(root, "test", 64, LAYOUT)
    again = evaluate(root / "run", images, tasks=["localization"], device="cpu")
    for result in again.results:
        assert result.value == done.value("localization", result.metric)


def test_the_report_puts_ours_beside_the_papers():
    key = find_recipe("cub200-vgg-alignmixup").key
    found = [
        Result("localization", metric, 50.0, key=key, seed=0)
        for metric in ("top1_loc", "maxboxacc_v2")
    ]
    shown = table(found, "localization")
    (row,) = [row for row in shown.rows if row[0] == "AlignMixup"]
    assert row[1:] == ("50.0 (53.1)", "50.0 (63.8)")


def test_boxes_of_streamed_files_are_those_of_the_view(root):
    files = scan_cub(root, "test", LAYOUT)
    squashed = boxes_in_view(files.boxes, files.paths, 64, squash=True)
    for ours, loaded in zip(squashed, load_cub(root, "test", 64, LAYOUT).boxes, strict=True):
        torch.testing.assert_close(ours, loaded)
