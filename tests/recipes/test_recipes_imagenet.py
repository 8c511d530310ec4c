"""The ImageNet table: the paper's schedule, and a run that streams its images from files."""

import dataclasses
import json
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from alignmixup import models
from alignmixup.datasets import StreamLoader, find
from alignmixup.datasets.imagenet import ImageNetLayout
from alignmixup.experiments import styling
from alignmixup.experiments.batches import eval_batches, load_split, side_of, train_batches
from alignmixup.experiments.run import train
from alignmixup.experiments.scoring import evaluate
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.mixups import IMAGENET
from alignmixup.recipes.schema import changed
from alignmixup.registry import DATASETS
from alignmixup.report import paper
from alignmixup.training import Stopped
from alignmixup.training.checkpoint import CHECKPOINT, load_checkpoint
from alignmixup.training.optim import learning_rate_share, make_optimizer
from torchvision_schemas import define_torchvision_schemas

NAMES = [name for name in recipe_names("imagenet-r50-*") if not name.endswith("-100")]
FAST = recipe_names("imagenet-r50-*-100")
LEVIT = recipe_names("imagenet-levit-128s-*")
WNIDS = ("n01440764", "n02084071")
SMALL = ImageNetLayout(num_classes=2, num_train=10, num_val=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for wnid in WNIDS:
        for split, count in (("train", 5), ("val", 2)):
            folder = place / "imagenet" / split / wnid
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{wnid}_{i}.JPEG")
    return place


@pytest.fixture
def small_imagenet(monkeypatch):
    source = find("imagenet")
    parts = {name: partial(getattr(source, name), layout=SMALL) for name in ("function", "scan")}
    monkeypatch.setitem(DATASETS._entries, "imagenet", dataclasses.replace(source, **parts))


def shrunk(name, **more):
    return changed(find_recipe(name).shrunk(), {"data.image_size": 64, **more})


def test_the_rows_are_those_of_the_table_and_the_unaligned_twins():
    methods = "baseline input cutmix manifold puzzlemix comixup saliencymix stylemix stylecutmix"
    ours = ("alignmixup", "alignmixup-ae", "alignmixup-unaligned", "alignmixup-ae-unaligned")
    beyond = {"-".join(filter(None, key)) for key in IMAGENET}  # the paper
    assert set(NAMES) == {f"imagenet-r50-{m}" for m in (*methods.split(), *ours, *beyond)}


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_is_the_papers(name):
    recipe = find_recipe(name)
    settings = recipe.train
    assert (settings.epochs, settings.schedule, settings.milestones) == (300, "step", (100, 200))
    assert (settings.lr, settings.classifier_lr, settings.decay) == (0.01, 0.1, 0.1)
    assert (settings.momentum, settings.weight_decay) == (0.9, 1e-4)
    assert settings.batch_size == 4 * 100
    data = recipe.data
    assert (data.name, data.stream, data.image_size) == ("imagenet", True, 224)
    assert (data.area, data.jitter, data.lighting) == ((0.08, 1.0), 0.4, 0.1)
    assert (data.resize, data.eval_resize, data.squash) == (None, None, False)


def test_the_rows_of_100_epochs_and_of_levit_are_those_of_the_paper():
    methods = {f.method for f in paper.find(table="imgnet")}
    assert len(methods) == 9
    assert set(FAST) == {f"imagenet-r50-{m}-100" for m in (*methods, "alignmixup-unaligned")}
    printed = {n for n in (*FAST, *LEVIT) if paper.cell_beside(find_recipe(n).key)}
    assert printed & set(FAST) == {f"imagenet-r50-{m}-100" for m in methods}
    five = {f.method for f in paper.find(table="levit")}
    assert set(LEVIT) == {f"imagenet-levit-128s-{m}" for m in (*five, "alignmixup-unaligned")}
    assert printed & set(LEVIT) == {f"imagenet-levit-128s-{m}" for m in five}
    cell = paper.cell_beside(find_recipe("imagenet-levit-128s-alignmixup").key)
    assert cell.top1_error == pytest.approx(100 - 69.9)


@pytest.mark.parametrize("name", FAST)
def test_the_100_epochs_are_the_fast_protocol(name):
    recipe = find_recipe(name)
    seen = [
        (epochs, stage.data.image_size, stage.data.area, stage.train.batch_size)
        for epochs, stage in recipe.stages()
    ]
    assert seen[0] == (range(15), 128, (0.08, 1.0), 1024)
    assert {(size, area, batch) for _, size, area, batch in seen[1:]} == {(224, (0.087, 1.0), 448)}
    assert seen[-1][0].stop == recipe.train.epochs == 100
    # As numpy.interp of each phase's own list gives it.
    for begin, end, epochs, rates in (
        (0, 15, (0, 8, 15), (0.5, 1.0, 0.125)),
        (15, 40, (15, 40), (0.2, 0.02)),
        (40, 100, (40, 65, 90, 100), (0.02, 0.002, 0.0002, 0.00002)),
    ):
        for progress in np.arange(begin, end, 0.37):
            rate = recipe.train.lr * learning_rate_share(recipe.train, float(progress))
            assert rate == pytest.approx(np.interp(progress, epochs, rates))
    clean = [getattr(stage.mixer, "clean_lam", None) for _, stage in recipe.stages()]
    assert clean == {
        "imagenet-r50-puzzlemix-100": [1.0, 1.0, 0.0],
        "imagenet-r50-comixup-100": [1.0, 1.0],
    }.get(name, [None, None])


def test_norms_of_the_fast_protocol_start_at_zero_and_are_not_decayed():
    recipe = find_recipe("imagenet-r50-baseline-100").shrunk()
    net = models.build(recipe.net, 10, (0.5,) * 3, (0.25,) * 3, 64)
    block = net.layer4[2].eval()
    x = torch.rand(2, 128, 2, 2)
    assert torch.equal(block(x), x)  # nothing but its shortcut, which is the identity
    groups = make_optimizer(net, recipe.train).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"])
    assert len(groups[1]["params"]) == sum(p.ndim <= 1 for p in net.parameters())


@pytest.mark.parametrize("name", LEVIT)
def test_levit_has_the_layers_that_are_mixed(name):
    define_torchvision_schemas()
    recipe = find_recipe(name)
    net = models.build(recipe.net, 10, (0.5,) * 3, (0.25,) * 3, 224)
    layers = [getattr(recipe.mixer, "layer", "")] if "align" in name else []
    layers += getattr(recipe.mixer, "layers", ())
    shapes = {}
    for layer in set(layers) - {"input"}:
        net.get_submodule(layer).register_forward_hook(
            lambda _, given, out, layer=layer: shapes.update({layer: tuple(out.shape)})
        )
    net.eval()(torch.zeros(1, 3, 224, 224))
    expected = {
        "alignmixup": {"model.stem": (1, 128, 14, 14)},
        "manifold": {"model.stages.0": (1, 196, 128), "model.stages.1": (1, 49, 256)},
    }
    assert shapes == expected.get(name.split("-")[3], {})
    if "align" in name:
        assert models.default_tap(recipe.net, net) == recipe.mixer.layer
    assert (recipe.train.optimizer, recipe.train.epochs) == ("adamw", 100)


@pytest.mark.parametrize("name", ["imagenet-r50-baseline", "imagenet-r50-alignmixup-ae"])
def test_the_classifier_has_its_own_rate_and_the_rest_the_other(name):
    recipe = find_recipe(name).shrunk()
    net = models.build(recipe.net, 10, (0.5,) * 3, (0.25,) * 3, 64)
    groups = make_optimizer(net, recipe.train).param_groups
    last = net.classifier if "-ae" in name else net.head
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in last.parameters()}
    assert [group["lr"] for group in groups] == [0.01, 0.1]
    assert sum(len(group["params"]) for group in groups) == len(list(net.parameters()))


def test_methods_have_the_settings_of_their_own_imagenet_runs():
    mixers = {name.removeprefix("imagenet-r50-"): find_recipe(name).mixer for name in NAMES}
    assert mixers["input"].alpha == mixers["manifold"].alpha == 0.2
    assert mixers["cutmix"].prob == mixers["saliencymix"].prob == 1.0
    assert (mixers["puzzlemix"].neigh_size, mixers["puzzlemix"].loss) == (2, "ce")
    assert (mixers["comixup"].compat_stride, mixers["comixup"].loss) == (8, "ce")
    ours = mixers["alignmixup"]
    assert (ours.layer, ours.alpha, ours.eps, ours.num_iters) == ("layer4", 2.0, 0.1, 100)
    assert dataclasses.replace(mixers["alignmixup-unaligned"], aligned=True) == ours
    assert len(mixers["alignmixup-ae"].cases) == 5


def test_the_autoencoder_has_the_papers_parameters():
    """35 M with decoder and all; the encoder's A is 2048 x 7 x 7."""
    spec = find_recipe("imagenet-r50-alignmixup-ae").net
    with torch.device("meta"):
        net = models.build(spec, 1000, (0.5,) * 3, (0.25,) * 3, 224)
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) == 35
    assert net.embed.reduce.in_channels == 2048
    assert net.embed.linear.in_features == 128 * 7 * 7


@pytest.mark.usefixtures("small_imagenet")
def test_batches_are_streamed_at_the_recipes_size(root):
    recipe = shrunk("imagenet-r50-alignmixup")
    files = {split: load_split(recipe.data, split, root) for split in ("train", "test")}
    assert side_of(recipe.data, files["train"]) == 64
    cpu = torch.device("cpu")
    loader = train_batches(recipe.data, recipe.train, files["train"], cpu)
    x, y = next(loader.epoch(0))
    assert x.shape == (4, 3, 64, 64)
    assert len(loader) == 2  # ten images, four a batch: the last two are left out
    plain = changed(recipe, {"data.jitter": 0.0, "data.lighting": 0.0}).data
    x2, y2 = next(train_batches(plain, recipe.train, files["train"], cpu).epoch(0))
    assert torch.equal(y, y2)
    assert (x - x2).abs().mean() > 0.02
    batches = eval_batches(recipe.data, recipe.train, files["test"], cpu)
    (first,), (second,) = list(batches), list(batches)
    assert torch.equal(first[0], second[0])
    assert first[1].tolist() == [0, 0, 1, 1]
    # 64 pixels from the center of 70 * 64/73.14: the shorter side of 70 shows its 7/8.
    image = Image.open(files["test"].paths[3]).convert("RGB")
    box = (45 - 30.625, 35 - 30.625, 45 + 30.625, 35 + 30.625)
    expected = image.resize((64, 64), Image.Resampling.BILINEAR, box=box)
    expected = torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255
    assert torch.equal(first[0][3], expected)


@pytest.mark.usefixtures("small_imagenet")
@pytest.mark.parametrize("method", ["alignmixup-ae", "stylemix"])
def test_a_recipe_trains_from_files_and_is_scored(method, root, tmp_path, monkeypatch):
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    recipe = shrunk(f"imagenet-r50-{method}")
    out = tmp_path / "run"
    summary = train(recipe, out, data_root=root, quiet=True).summary
    assert summary.is_complete
    assert 0 <= summary.last <= 100
    events = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert sum(events[-1]["cases"].values()) == 2
    if method == "alignmixup-ae":
        effects = [e for e in events if e["event"] == "alignment_effect"]
        assert effects[0]["features"] > 0
    before = (out / "checkpoint.safetensors").read_bytes()
    train(recipe, out, data_root=root, quiet=True)
    assert (out / "checkpoint.safetensors").read_bytes() == before


AUGMENTED = {"data.rand_augment": 9.0, "data.erasing": 0.5, "data.repeats": 3}


@pytest.mark.usefixtures("small_imagenet")
def test_the_augmentation_of_a_recipe_reaches_its_batches(root):
    plain, recipe = (shrunk("imagenet-r50-baseline", **more) for more in ({}, AUGMENTED))
    files, cpu = load_split(recipe.data, "train", root), torch.device("cpu")
    batches = [next(train_batches(r.data, r.train, files, cpu).epoch(0)) for r in (plain, recipe)]
    (_, y), (x, repeated) = batches
    assert repeated.tolist() == [*[int(y[0])] * 3, int(y[1])]
    assert not torch.equal(x[0], x[1])


@pytest.mark.slow
@pytest.mark.usefixtures("small_imagenet")
def test_an_augmented_run_resumes_bit_for_bit(root, tmp_path, monkeypatch):
    recipe = shrunk("imagenet-r50-cutmix", **AUGMENTED, **{"train.epochs": 2})
    train(recipe, tmp_path / "whole", data_root=root, quiet=True)
    whole = StreamLoader.epoch

    def stopping(self, epoch, start_step=0):
        for step, batch in enumerate(whole(self, epoch, start_step)):
            if (epoch, start_step + step) == (1, 1):
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(StreamLoader, "epoch", stopping)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "parts", data_root=root, quiet=True)
    monkeypatch.setattr(StreamLoader, "epoch", whole)
    train(recipe, tmp_path / "parts", data_root=root, quiet=True)
    one, other = (load_checkpoint(tmp_path / n / CHECKPOINT).tensors for n in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("small_imagenet")
def test_a_run_of_full_size_is_scored_on_val(root, tmp_path):
    """``evaluate`` sees val as training's own evaluation does."""
    recipe = find_recipe("imagenet-r50-baseline").shrunk()
    train(recipe, tmp_path / "run", data_root=root, quiet=True)
    done = evaluate(tmp_path / "run", data_root=root, device="cpu")
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    recorded = {r["metric"]: r["value"] for r in map(json.loads, lines)}
    assert done.value("accuracy", "top1") == recorded["top1_last"]


def test_other_data_without_files_are_taken_into_memory(tmp_path):
    """``alignmixup train imagenet-r50-... --dataset shapes``."""
    spec = dataclasses.replace(find_recipe("imagenet-r50-baseline").data, name="shapes")
    images = load_split(spec, "test", tmp_path)
    assert side_of(spec, images) == images.images.shape[-1] == 32
