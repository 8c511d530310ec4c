"""Evaluation: sources of outliers, progress, users' own loaders, and what is left out."""

import dataclasses
import itertools
import time
from functools import partial
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import alignmixup as am
from alignmixup import datasets, models
from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.datasets.tiny_imagenet import TinyLayout, load_tiny
from alignmixup.evaluation import outliers
from alignmixup.evaluation.outliers import find_outliers, sources_for
from alignmixup.evaluation.subject import EvalImages, Subject, eval_images
from alignmixup.evaluation.task_options import task_options
from alignmixup.evaluation.tasks.localization import localization
from alignmixup.experiments import run_folder, styling
from alignmixup.experiments.data_record import DataRecord, check_classes
from alignmixup.experiments.provenance import provenance
from alignmixup.experiments.run import Sets, train
from alignmixup.experiments.run_folder import append_results
from alignmixup.experiments.scoring import evaluate, other_images, run_images, task_names
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe, changed, on_data
from alignmixup.registry import DATASETS, TASKS, register_task
from alignmixup.report.reading import read_results
from alignmixup.report.tables import table
from alignmixup.training import Team, TrainSettings
from picture_folder import make_pictures
from tiny_folder import LAYOUT, make_tiny

PAPER = ["lsun-crop", "lsun-resize", "isun", "tiny-crop", "tiny-resize", "uniform", "gaussian"]


class Brightness(nn.Module):
    """Sure of class 0 where an image is bright, of class 1 where it is dark: easily scored."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(40.0))

    def forward(self, x):
        z = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([z, -z], dim=1)


@pytest.fixture(scope="module")
def images():
    return shapes("test", 40)


@pytest.fixture(scope="module")
def two_tone():
    """White and black images: a Brightness is certain of all of them."""
    pixels = torch.tensor([255, 0] * 5, dtype=torch.uint8).view(-1, 1, 1, 1)
    whole = pixels.expand(-1, 3, 8, 8).contiguous()
    return am.ImageSet(
        "twotone",
        "test",
        whole,
        torch.tensor([0, 1] * 5),
        ("white", "black"),
        (0.5,) * 3,
        (0.5,) * 3,
    )


def save(path, size, color, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """ODIN's folders and the val part of a small Tiny-ImageNet, nothing else."""
    for i in range(3):
        save(tmp_path / "LSUN" / "test" / f"{i}.jpg", (12, 12), (130, 130, 130))
        save(tmp_path / "LSUN_resize" / "LSUN_resize" / f"{i}.png", (8, 8), (120, 120, 120))
    save(tmp_path / "iSUN" / "iSUN_patches" / "a.jpeg", (8, 8), 127, "L")
    save(
        tmp_path / "iSUN" / "iSUN_patches" / "deep" / "b.png", (11, 30), (128, 128, 128, 9), "RGBA"
    )
    for i in range(4):
        save(tmp_path / "tiny-imagenet-200" / "val" / "images" / f"val_{i}.JPEG", (64, 64), i)
    layout = TinyLayout(num_val=4)
    for name in ("list_tiny_val", "load_tiny_val"):
        monkeypatch.setattr(
            outliers.datasets, name, partial(getattr(datasets, name), layout=layout)
        )
    return tmp_path


def test_what_is_held_against_what():
    assert sources_for("cifar10") == [*PAPER, "cifar100"]
    assert sources_for("cifar100") == [*PAPER, "cifar10"]
    assert sources_for("shapes") == PAPER
    for dataset in ("tiny", "imagenet"):  # the classes of the first are among the second's
        assert [n for n in PAPER if n not in sources_for(dataset)] == ["tiny-crop", "tiny-resize"]


def test_every_source_is_found_and_scored(two_tone, root):
    folder = f"folder:{root / 'iSUN'}"
    done = evaluate(Brightness(), two_tone, tasks=["ood"], ood=["all", folder], data_root=root)
    assert done.left_out == {}
    counts = {r.settings["source"]: r.settings["num_ood"] for r in done.results}
    assert counts == {
        "lsun-crop": 3,
        "lsun-resize": 3,
        "isun": 2,
        "tiny-crop": 4,
        "tiny-resize": 4,
        "uniform": 10,
        "gaussian": 10,
        folder: 2,
    }
    # Gray images are told from white and black ones; black ones are not.
    assert done.value("ood", "auroc", "isun") == 100
    assert done.value("ood", "auroc", folder) == 100
    assert done.value("ood", "auroc", "tiny-crop") < 100
    with pytest.raises(ValueError, match="no result ood/auroc of mars"):
        done.value("ood", "auroc", "mars")
    with pytest.raises(ValueError, match=r"several sources: name one of \['folder:.*'uniform'\]"):
        done.value("ood", "auroc")


def test_cifar_is_held_against_the_other_cifar(two_tone, monkeypatch, tmp_path):
    other = dataclasses.replace(
        two_tone, name="cifar100", images=torch.full((6, 3, 32, 32), 127, dtype=torch.uint8),
        labels=torch.zeros(6, dtype=torch.int64),
    )  # fmt: skip
    small = dataclasses.replace(datasets.find("cifar100"), function=lambda root, split: other)
    monkeypatch.setitem(DATASETS._entries, "cifar100", small)
    inside = dataclasses.replace(two_tone, name="cifar10")
    done = evaluate(Brightness(), inside, tasks=["ood"], data_root=tmp_path)
    assert done.value("ood", "auroc", "cifar100") == 100
    assert "ood lsun-crop" in done.left_out
    assert "ood cifar100" not in done.left_out


def test_crops_are_central_pixels_and_resizing_keeps_the_whole_square(root):
    pixels = np.zeros((12, 12, 3), np.uint8)
    pixels[2:10, 2:10] = 200
    Image.fromarray(pixels).save(root / "LSUN" / "test" / "0.png")
    (batch,) = find_outliers("lsun-crop", (3, 8, 8), root=root).read(1)
    assert (batch == 200 / 255).flatten(1).all(1).sum() == 1
    (batch,) = find_outliers(f"folder:{root / 'LSUN'}", (3, 12, 12), root=root).read(1)
    assert torch.equal(batch[1], torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    (batch,) = find_outliers("tiny-crop", (3, 8, 8), root=root).read(1)
    assert batch.shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("LSUN/test/1.jpg", b"rubbish", r"test/1\.jpg cannot be read as an image"),
        ("LSUN/test/1.jpg", b"", r"test/1\.jpg is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(two_tone, root, file, content, message):
    (root / file).write_bytes(content)
    score = partial(evaluate, Brightness(), two_tone, tasks=["ood"], data_root=root)
    left_out = score().left_out
    assert list(left_out) == ["ood lsun-crop"]
    assert "1.jpg" in left_out["ood lsun-crop"]
    with pytest.raises(ValueError, match=message):
        score(ood=["lsun-crop"])
    with pytest.raises(ValueError, match=message):
        score(ood=["all", f"folder:{root / 'LSUN'}"])


def test_sources_that_cannot_be_used_are_explained_before_anything_runs(two_tone, root, tmp_path):
    told = []
    score = partial(
        evaluate, Brightness(), two_tone, tasks=["accuracy", "ood"], data_root=root,
        on_task=told.append,
    )  # fmt: skip
    (tmp_path / "empty").mkdir()
    for name, kind, message in [
        ("folder:/nowhere", FileNotFoundError, "there is no folder /nowhere"),
        (f"folder:{tmp_path / 'empty'}", ValueError, "empty and its subfolders have no image"),
        ("folder:", ValueError, "names no folder"),
        (
            "lsun",
            ValueError,
            "unknown out-of-dist.* source 'lsun'; did you mean .*'lsun-crop'",
        ),
        ("cifar10", FileNotFoundError, "cifar"),
    ]:
        with pytest.raises(kind, match=message):
            score(ood=[name])
    assert told == []
    (root / "tiny-imagenet-200" / "val" / "images" / "val_0.JPEG").unlink()
    done = score()
    assert "3 images, not 4" in done.left_out["ood tiny-crop"]
    large = dataclasses.replace(two_tone, images=torch.zeros(10, 3, 64, 64, dtype=torch.uint8))
    done = evaluate(Brightness(), large, tasks=["ood"], data_root=root)
    assert "12 x 12 pixels, too few for a crop of 64 x 64" in done.left_out["ood lsun-crop"]


def test_nothing_to_hold_against_is_left_out(two_tone, tmp_path):
    done = evaluate(Brightness(), two_tone, tasks=["ood"], ood=[], data_root=tmp_path)
    assert done.left_out == {"ood": "no out-of-distribution images"}


def test_progress_is_told_within_a_task(images):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    told = []
    tasks = ["accuracy", "pgd"]
    evaluate(
        net, images, tasks=tasks, batch_size=16,
        on_task=lambda name: told.append((name, [])),
        on_images=lambda done, total: told[-1][1].append((done, total)),
    )  # fmt: skip
    assert dict(told)["accuracy"] == [(16, 40), (32, 40), (40, 40)]
    steps = [done for done, total in dict(told)["pgd"]]
    assert len(steps) == 3 * 20
    assert steps == sorted(steps)
    assert steps[:2] == [0, 1]  # one of twenty steps on sixteen images, then two
    assert steps[-1] == 40


MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


class Bare(nn.Module):
    """A network whose loader normalizes: its own normalization is taken out."""

    def __init__(self, net):
        super().__init__()
        self.body = net
        self.body.normalize = nn.Identity()

    def forward(self, x):
        return self.body(x)


def test_a_loader_that_normalizes_gives_what_pixels_give(images):
    spec = NetSpec("preact_resnet18", width=4)
    net = models.build(spec, 10, MEAN, STD, 32, seed=0)
    bare = Bare(models.build(spec, 10, MEAN, STD, 32, seed=0))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    x = (images.images.float() / 255 - mean) / std
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, images.labels), batch_size=16
    )
    names = ["accuracy", "fgsm", "pgd", "calibration", "ood", "localization", "temperature"]
    by = {"normalized_by": (MEAN, STD), "ood": ["uniform", "gaussian"], "tasks": names}
    by["options"] = {"pgd": {"num_steps": 2}}
    ours = evaluate(net, images, tasks=names, ood=by["ood"], options=by["options"])
    theirs = evaluate(bare, loader, boxes=images.boxes, **by)
    half = evaluate(bare, images, **by)
    assert len(ours.results) == len(theirs.results) == len(half.results) > 30
    for a, b, c in zip(ours.results, theirs.results, half.results, strict=True):
        assert (a.task, a.metric) == (b.task, b.metric) == (c.task, c.metric)
        # An image on the edge of a decision may fall to either side of it by rounding.
        assert b.value == pytest.approx(a.value, rel=1e-3, abs=2.6), a
        assert c.value == pytest.approx(a.value, rel=1e-3, abs=2.6), a
    for metric in ("nll", "brier", "ece"):
        value = ours.value("calibration", metric)
        assert theirs.value("calibration", metric) == pytest.approx(value, rel=1e-4)


def test_tasks_are_done_once_and_what_names_none_is_explained(two_tone):
    def tasks_of(tasks, **options):
        return [r.task for r in evaluate(Brightness(), two_tone, tasks=tasks, **options).results]

    assert tasks_of(["accuracy", "accuracy"]) == tasks_of(["accuracy"])
    assert task_names(["accuracy", "all"]) == task_names(["all"])
    with pytest.raises(ValueError, match=r"no task is named; choose from accuracy, .*, all"):
        tasks_of([])
    with pytest.raises(ValueError, match=r"a list of names: write \['accuracy'\]"):
        tasks_of("accuracy")
    with pytest.raises(ValueError, match=r"\['isnu'\] are named, but 'ood' is not among the tasks"):
        tasks_of(["accuracy"], ood=["all", "isnu"])


def test_a_source_that_is_named_twice_is_measured_once(two_tone):
    def measured(ood):
        results = evaluate(Brightness(), two_tone, tasks=["ood"], ood=ood).results
        return [(r.metric, r.settings["source"], r.value) for r in results]

    assert measured(["uniform", "gaussian", "uniform"]) == measured(["uniform", "gaussian"])


def test_wrong_users_data_is_explained(images):
    x, y = images.images.float() / 255, images.labels
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\].*normalized_by"):
        evaluate(Brightness(), [(2 * x - 1, y)])
    with pytest.raises(ValueError, match="pass a list or a loader"):
        evaluate(Brightness(), ((a, b) for a, b in [(x, y)]))
    with pytest.raises(ValueError, match=r"ImageSet or batches \(x, y\)"):
        evaluate(Brightness(), [x])
    with pytest.raises(ValueError, match=r"ImageSet or batches \(x, y\)"):
        evaluate(Brightness(), [{"x": x, "y": y}])
    with pytest.raises(ValueError, match=r"ImageSet or batches \(x, y\)"):
        evaluate(Brightness(), [])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.1"):
        evaluate(Brightness(), [(x, y)])


def test_localization_leaves_images_without_a_box_out(images):
    net = models.build(NetSpec("preact_resnet18", width=4), 10, images.mean, images.std, 32, seed=0)
    some = tuple(b if i % 3 else b[:0] for i, b in enumerate(images.boxes))
    done = evaluate(net, dataclasses.replace(images, boxes=some), tasks=["localization"])
    kept = [i for i in range(40) if i % 3]
    x, y = images.images[kept].float() / 255, images.labels[kept]
    expected = localization(net, [(x, y)], [images.boxes[i] for i in kept])
    assert {r.metric: r.value for r in done.results} == {r.metric: r.value for r in expected}
    assert done.results[0].settings["num_images"] == len(kept)
    none = dataclasses.replace(images, boxes=tuple(b[:0] for b in images.boxes))
    done = evaluate(net, none, tasks=["localization"])
    assert done.left_out == {"localization": "no image has a box"}


def test_networks_with_maps_of_their_own_are_localized(images):
    net = models.ACoL(10, images.mean, images.std, width=2)
    few = dataclasses.replace(
        images, images=images.images[:6], labels=images.labels[:6], boxes=images.boxes[:6]
    )
    done = evaluate(net, few, tasks=["localization"])
    assert done.left_out == {}
    assert 0 <= done.value("localization", "maxboxacc_v2") <= 100


def recipe_on(name, mixer=None):
    return Recipe(
        key=RecipeKey(name, "r18", "baseline"),
        data=DataSpec(name),
        net=NetSpec("preact_resnet18", width=4),
        mixer=mixer or NoMix(),
        train=TrainSettings(epochs=1, batch_size=4, milestones=(), device="cpu"),
    )


def test_localization_of_a_run_on_tiny_imagenet_from_the_command_line(
    tmp_path, monkeypatch, capsys
):
    make_tiny(tmp_path)
    small = dataclasses.replace(datasets.find("tiny"), function=partial(load_tiny, layout=LAYOUT))
    monkeypatch.setitem(DATASETS._entries, "tiny", small)
    train(recipe_on("tiny"), tmp_path / "run", data_root=tmp_path, quiet=True)
    args = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path), "--device", "cpu"]
    assert main([*args, "--tasks", "localization"]) == 0
    out = capsys.readouterr().out
    for metric in ("top1_loc", "gt_known_loc", "maxboxacc", "maxboxacc_v2"):
        assert metric in out
    assert "left out" not in out


def test_localization_of_a_run_on_a_folder_with_a_list_of_boxes(tmp_path, capsys):
    place = tmp_path / "birds"
    for split, label in [("train", "ant"), ("train", "bee"), ("val", "ant"), ("val", "bee")]:
        for i in range(2):
            save(place / split / label / f"{label}{i}.png", (24, 16), (9 * i, 50, 90))
    lines = ["val/ant/ant0.png,4,0,19,15", "val/bee/bee1.png,6,2,10,8", "val/bee/bee1.png,0,0,3,3"]
    (place / "localization.txt").write_text("\n".join(lines))
    name = f"folder:{place}@16"
    train(recipe_on(name), tmp_path / "run", quiet=True)
    assert main(["evaluate", str(tmp_path / "run"), "--tasks", "localization"]) == 0
    assert "maxboxacc_v2" in capsys.readouterr().out
    found = datasets.load(name, "test")
    # The square is columns 4 to 20 of 24; what is left of it is cut off, or gone.
    assert [b.tolist() for b in found.boxes] == [[[0, 0, 16, 16]], [], [], [[2, 2, 7, 9]]]


def test_a_style_mixer_is_timed_with_the_weights_of_its_run(tmp_path, monkeypatch, images):
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    few = Sets(shapes("train", 8), shapes("test", 8))
    train(recipe_on("shapes", StyleMix()), tmp_path / "run", sets=few, quiet=True)
    done = evaluate(tmp_path / "run", few.test, tasks=["cost"], device="cpu")
    assert done.value("cost", "ms_per_batch") > 0


@pytest.mark.usefixtures("few_shapes")
def test_sources_are_named_on_the_command_line(tmp_path, capsys, images):
    few = Sets(shapes("train", 8), images)
    train(recipe_on("shapes"), tmp_path / "run", sets=few, quiet=True)
    save(tmp_path / "a" / "x.png", (40, 30), (1, 2, 3))
    save(tmp_path / "b" / "c" / "y.png", (3, 5), 7, "L")
    args = ["evaluate", str(tmp_path / "run"), "--tasks", "ood", "--data", str(tmp_path)]
    folders = [f"folder:{tmp_path / name}" for name in "ab"]
    assert main([*args, "--ood", folders[0], "--ood", folders[1], "uniform"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[-1] for line in out.splitlines() if " auroc " in line} == {
        *folders,
        "uniform",
    }
    assert main([*args, "--ood", "folder:/nowhere"]) == 1
    assert capsys.readouterr().err.strip() == "alignmixup: there is no folder /nowhere"


# Figures are of the images that a run is scored on.


def test_figures_show_streamed_images_as_a_run_is_scored_on_them(tmp_path):
    """They were those of the folder's own size, cut out of the files in another way."""
    name = make_pictures(tmp_path / "pets", num_train=4, side=40)
    spec = DataSpec(name, stream=True, image_size=24, eval_resize=32)
    recipe = dataclasses.replace(recipe_on(name), data=spec)
    run = train(recipe, tmp_path / "run", quiet=True)
    images = run_images(run.folder, None)
    assert images.images.shape[2:] == (24, 24)
    own, shown = (
        evaluate(*of, tasks=["calibration"]).value("calibration", "nll")
        for of in ((run,), (run.model, images))
    )
    assert own == pytest.approx(shown, rel=1e-5)
    assert len(run_images(run.folder, None, most=3)) == 3


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("command", ["figure correspondences --run", "decoder"])
def test_images_that_do_not_load_by_name_are_not_replaced_by_others(tmp_path, capsys, command):
    dark = dataclasses.replace(shapes("test", 8), images=shapes("test", 8).images // 2)
    train(recipe_on("shapes"), tmp_path / "run", sets=Sets(shapes("train", 8), dark), quiet=True)
    out = ["--out", str(tmp_path / "drawn")] if command.startswith("figure") else []
    assert main([*command.split(), str(tmp_path / "run"), *out]) == 1
    assert "was trained on images passed as sets=" in capsys.readouterr().err


# What a result says of itself.


def test_two_that_append_at_once_lose_no_line(tmp_path, monkeypatch):
    read = run_folder.whole_lines

    def read_slowly(path):
        found = read(path)
        time.sleep(0.05)  # so that all have read before any writes, if they can
        return found

    monkeypatch.setattr(run_folder, "whole_lines", read_slowly)
    results = [am.Result("accuracy", "top1", float(i)) for i in range(4)]
    threads = [Thread(target=append_results, args=(tmp_path, [r])) for r in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.value for r in read_results([tmp_path])) == [0, 1, 2, 3]


def test_noise_has_its_seed_among_the_settings_and_seeds_are_still_averaged(two_tone, root):
    done = evaluate(
        Brightness(), two_tone, tasks=["ood"], ood=["uniform", "gaussian", "isun"], seed=5,
        data_root=root,
    )  # fmt: skip
    seeds = {r.settings["source"]: r.settings.get("seed") for r in done.results}
    assert seeds == {"uniform": 5, "gaussian": 5, "isun": None}
    (uniform,) = [
        r for r in done.results if (r.metric, r.settings["source"]) == ("auroc", "uniform")
    ]
    runs = [
        dataclasses.replace(
            uniform,
            key=RecipeKey("cifar100", "r18", "input"),
            seed=s,
            settings={**uniform.settings, "seed": s},
        )
        for s in (0, 1)
    ]
    (row,) = table(runs, "ood", paper_rows=False).rows
    assert "n=2" in row[1]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_other_data_are_prepared_as_the_images_of_the_run(tmp_path, is_streamed):
    """The same pictures, by the run's name for them, without their size, and as shards."""
    rng = np.random.default_rng(0)
    for split, label, i in itertools.product(("train", "val"), "ab", range(4)):
        file = tmp_path / "pets" / split / label / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 28, 3), dtype=np.uint8)).save(file)
    named = f"folder:{tmp_path / 'pets'}"
    recipe = on_data(recipe_on("shapes"), f"{named}@16")
    run = tmp_path / "run"
    train(changed(recipe, {"data.stream": is_streamed}), run, quiet=True)
    datasets.write_shards(datasets.find(named), tmp_path / "shards")
    own = evaluate(run, tasks=["calibration"], device="cpu").value("calibration", "nll")
    for name in (f"{named}@16", named, f"shards:{tmp_path / 'shards'}"):
        other = other_images(run, name, None, Team(), "cpu")
        scores = evaluate(run, other, tasks=["calibration"], device="cpu")
        assert scores.value("calibration", "nll") == own
    if is_streamed:
        with pytest.raises(ValueError, match=r"scored at their size, 16: leave @24 out"):
            other_images(run, f"{named}@24", None, Team(), "cpu")
    else:
        assert other_images(run, f"{named}@24", None, Team(), "cpu").images.shape[-1] == 24


@pytest.mark.usefixtures("few_shapes")
def test_classes_of_other_names_are_matched_by_order_and_named(tmp_path, images):
    run = tmp_path / "run"
    train(recipe_on("shapes"), run, sets=Sets(shapes("train", 8), images), quiet=True)
    score = partial(evaluate, run, tasks=["accuracy"], device="cpu")
    numbered = dataclasses.replace(images, class_names=tuple(map(str, range(10))))
    with pytest.warns(UserWarning, match=r"10 classes \(0, 1, 2, \.\.\.\): they are matched by"):
        scores = score(numbered)
    assert scores.value("accuracy", "top1") == score(images).value("accuracy", "top1")
    with pytest.raises(ValueError, match="of the run's classes, in their order"):
        score(dataclasses.replace(images, class_names=images.class_names[::-1]))
    record = DataRecord("mine", tuple(map(str, range(1, 11))), 32, (0.5,) * 3, (0.5,) * 3, 8, 8)
    with pytest.warns(UserWarning, match="matched by their order"):  # numbered from 1, and from 0
        check_classes(run, record, numbered, is_given=True)
    # One class renamed: in alphabetical order the names after it have other places.
    moved = (*images.class_names[:4], *images.class_names[5:], "zebra")
    named = rf"10 classes \(\.\.\., {moved[3]}, {moved[4]}, .*in their order"
    with pytest.raises(ValueError, match=named):
        score(dataclasses.replace(images, class_names=moved))


def test_results_on_other_images_say_on_which(tmp_path):
    few = Sets(shapes("train", 8), shapes("test", 8))
    train(recipe_on("shapes"), tmp_path / "run", sets=few, quiet=True)
    dark = dataclasses.replace(few.test, name="dark", images=few.test.images // 8)
    evaluate(tmp_path / "run", dark, tasks=["calibration"], device="cpu")
    on_which = [r.settings.get("images") for r in read_results([tmp_path / "run"])]
    assert on_which[:2] == [None] * 2  # recorded by training
    assert set(on_which[2:]) == {"dark/test, 8 images"}


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/bin/alignmixup", "alignmixup train 'my run'"),
        ("/lib/alignmixup/__main__.py", "alignmixup train 'my run'"),
        ("/home/alignmixup/mine.py", ""),
    ],
)
def test_the_command_is_that_of_the_program_also_as_a_module(monkeypatch, program, command):
    monkeypatch.setattr("sys.argv", [program, "train", "my run"])
    assert provenance()["command"] == command


def test_the_hardware_is_that_of_the_device(two_tone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    assert provenance()["hardware"] == "GPU None"
    assert provenance(torch.device("cuda:1"))["hardware"] == "GPU cuda:1"
    for result in evaluate(Brightness(), two_tone, device="cpu").results:
        assert "GPU" not in result.hardware


# Options of tasks.


def test_options_reach_their_task_and_its_settings(images):
    net = models.build(NetSpec("preact_resnet18", width=4), 10, images.mean, images.std, 32, seed=0)
    options = {
        "fgsm": {"eps": 2 / 255},
        "pgd": {"num_steps": 2, "loss": "margin", "restarts": 2},
        "strong_attack": {"num_steps": 3},
        "calibration": {"num_bins": 7},
        "temperature": {"held_out": 0.25},
        "ood": {"score": "energy"},
        "localization": {"convention": "exact", "layer": "layer4", "classifier": "head.linear"},
        "cost": {"num_steps": 2, "num_warmup": 0},
    }
    done = evaluate(net, images, tasks=list(options), options=options, ood=["uniform"])
    assert done.left_out == done.failed == {}
    for task, chosen in options.items():
        settings = [r.settings for r in done.results if r.task == task and r.metric != "params"]
        for name, value in chosen.items():
            assert {s[name] for s in settings} == {value}, (task, name)
    plain = evaluate(net, images, tasks=["ood"], ood=["uniform"])
    assert done.value("ood", "auroc") != plain.value("ood", "auroc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pdg": {"num_steps": 2}}, r"unknown task 'pdg'; did you mean 'pgd'\?"),
        ({"pgd": {"steps": 2}}, r"pgd has no option 'steps'; did you mean .*'num_steps'"),
        ({"accuracy": {"k": 2}}, "accuracy has no option 'k'; it has none"),
        ({"pgd": {"seed": 2}}, "pgd has no option 'seed'"),
        (
            {"ood": {"score": "energy"}},
            r"'ood', which is not among the tasks \['accuracy', 'pgd'\]",
        ),
        ({"pgd": {"num_steps": "many"}}, "pgd.num_steps must be int, got 'many'"),
        ({"pgd": 4}, "must be a dict of names, got 4"),
        (["pgd"], r"options must be a dict such as .*, got \['pgd'\]"),
    ],
)
def test_wrong_options_are_explained_before_anything_runs(two_tone, options, message):
    told = []
    with pytest.raises(ValueError, match=message):
        evaluate(
            Brightness(), two_tone, tasks=["accuracy", "pgd"], options=options, on_task=told.append
        )
    assert told == []


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("fgsm", {"eps": 2.0}, r"fgsm: eps must lie in \[0, 1\]"),
        ("pgd", {"step": 0.0}, r"pgd: step must lie in \(0, 1\]"),
        ("pgd", {"chunk": 0}, "pgd: chunk must be at least 1 image, got 0"),
        ("pgd", {"restarts": 2, "random_start": False}, "all take the same path"),
        ("strong_attack", {"restarts": 0}, "got 50 and 0"),
        ("calibration", {"num_bins": 0}, "calibration: num_bins must be at least 1, got 0"),
        ("temperature", {"held_out": 1.0}, "temperature: held_out must be a share .*, got 1.0"),
        ("cost", {"num_steps": 0}, "cost: num_steps must be at least 1 .*, got 0 and 3"),
        ("localization", {"cam_threshold": 1.0}, r"localization: cam_threshold must lie in"),
        ("bounded", {"top": 9}, "bounded: top must be at most 5, got 9"),
    ],
)
def test_ranges_are_checked_before_anything_runs(two_tone, task, options, message):
    def check(given):
        if given["top"] > 5:
            raise ValueError(f"top must be at most 5, got {given['top']}")

    @register_task("bounded", check=check)
    def bounded(model, batches, *, top: int = 2):
        return []

    told = []
    with pytest.raises(ValueError, match=message):
        evaluate(
            Brightness(),
            two_tone,
            tasks=["accuracy", task],
            options={task: options},
            on_task=told.append,
        )
    assert told == []


def test_an_unknown_score_is_explained_before_anything_runs(two_tone):
    told = []
    with pytest.raises(
        ValueError, match=r"ood\.score must be 'max_softmax' or 'energy' or 'entropy'"
    ):
        evaluate(
            Brightness(),
            two_tone,
            tasks=["accuracy", "ood"],
            ood=["uniform"],
            options={"ood": {"score": "enrgy"}},
            on_task=told.append,
        )
    assert told == []


def test_images_alone_are_explained(two_tone):
    with pytest.raises(ValueError, match="pass an ImageSet or batches"):
        evaluate(Brightness(), two_tone.images.float() / 255)


def test_a_precision_by_name_is_explained(two_tone):
    with pytest.raises(ValueError, match=r"a type such as torch\.bfloat16, got 'bf16'"):
        evaluate(Brightness(), two_tone, amp_dtype="bf16")
    for wide in (torch.float32, torch.float64):  # autocast would be off, and the record wrong
        with pytest.raises(
            ValueError, match=rf"got {wide}: torch\.bfloat16, torch\.float16 or None"
        ):
            evaluate(Brightness(), two_tone, amp_dtype=wide)


def test_boxes_that_are_passed_are_those_of_images_that_stream(images):
    x, y = images.images.float() / 255, images.labels
    streamed = EvalImages([(x, y)], "files", (3, 32, 32), len(x))
    subject = Subject(Brightness(), streamed)
    assert eval_images(subject, None, None, 500).boxes is None
    assert eval_images(subject, images.boxes, None, 500).boxes == images.boxes


def test_every_option_of_every_task_has_a_type():
    assert {name for name in TASKS if not task_options(name)} == {"accuracy"}
    assert set(task_options("ood")) == {"score", "prior"}
    assert set(task_options("localization")) == {
        "cam_threshold",
        "iou_threshold",
        "v2_iou_thresholds",
        "threshold_step",
        "convention",
        "box",
        "layer",
        "classifier",
    }


@pytest.mark.slow
def test_options_and_detection_on_the_command_line(tmp_path, capsys):
    few = Sets(shapes("train", 8), shapes("test"))
    train(recipe_on("shapes"), tmp_path / "run", sets=few, quiet=True)
    args = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path), "--device", "cpu"]
    words = ["pgd.num_steps=2", "pgd.eps=3/255", "calibration.num_bins=10"]
    assert main([*args, "--tasks", "pgd", "calibration", "--set", *words]) == 0
    newest = {r.task: r.settings for r in read_results([tmp_path / "run"])}
    assert newest["pgd"]["num_steps"] == 2
    assert newest["pgd"]["eps"] == 3 / 255
    assert newest["calibration"]["num_bins"] == 10
    assert main([*args, "--set", "pgd.num_steps"]) == 1
    assert "--set takes NAME=VALUE, e.g. pgd.num_steps=40" in capsys.readouterr().err
    assert main([*args, "--tasks", "detection"]) == 1
    assert "use 'alignmixup detect RUN --data voc'" in capsys.readouterr().err


def test_detection_is_among_what_all_leaves_out(two_tone, tmp_path):
    done = evaluate(Brightness(), two_tone, tasks=["all"], data_root=tmp_path)
    assert "alignmixup detect RUN" in done.left_out["detection"]
    assert "detection" not in evaluate(Brightness(), two_tone, tasks=["accuracy"]).left_out


# Data of other shapes and types, and tasks that fail.


class AnyShape(nn.Module):
    """Takes images of one shape alone, and remembers what it was given."""

    def __init__(self, shape, num_classes=2):
        super().__init__()
        self.seen = set()
        self.linear = nn.Linear(int(np.prod(shape)), num_classes)

    def forward(self, x):
        self.seen.add(tuple(x.shape[1:]))
        return self.linear(x.flatten(1))


def test_outliers_have_the_height_and_width_of_the_images(root):
    model = AnyShape((3, 6, 8))
    loader = [(torch.rand(5, 3, 6, 8), torch.tensor([0, 1, 0, 1, 0]))]
    sources = ["all", f"folder:{root / 'iSUN'}"]
    done = evaluate(model, loader, tasks=["ood"], ood=sources, data_root=root)
    assert done.left_out == {}
    assert len({r.settings["source"] for r in done.results}) == 8
    assert model.seen == {(3, 6, 8)}


def test_images_of_one_channel_are_held_against_noise_alone(root):
    model = AnyShape((1, 8, 8))
    loader = [(torch.rand(6, 1, 8, 8), torch.tensor([0, 1] * 3))]
    done = evaluate(model, loader, tasks=["all"], data_root=root)
    assert done.failed == {}
    assert {r.settings["source"] for r in done.results if r.task == "ood"} == {
        "uniform",
        "gaussian",
    }
    assert done.left_out["ood isun"] == "isun has images of 3 channels, the test images have 1"
    assert model.seen == {(1, 8, 8)}
    with pytest.raises(ValueError, match="isun has images of 3 channels"):
        evaluate(model, loader, tasks=["ood"], ood=["isun"], data_root=root)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_type_takes_pixels_and_noise(images, dtype, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)
    )
    expected = evaluate(net, images, tasks=["calibration"]).value("calibration", "nll")
    net.to(dtype)
    quick = {"strong_attack": {"num_steps": 2}, "pgd": {"num_steps": 2}}
    done = evaluate(net, images, tasks=["all"], options=quick, data_root=tmp_path)
    assert done.failed == {}
    assert {r.task for r in done.results} == set(TASKS)
    assert done.value("calibration", "nll") == pytest.approx(expected, rel=2e-3)
    pixels = [(images.images.to(dtype) / 255, images.labels)]
    assert evaluate(net, pixels).value("accuracy", "top1") >= 0


def test_pixels_that_are_called_normalized_are_refused(images):
    x, y = images.images.float() / 255, images.labels
    net = AnyShape((3, 32, 32), 10)
    score = partial(evaluate, net, tasks=["accuracy"], normalized_by=(MEAN, STD))
    with pytest.raises(
        ValueError, match=r"all values of the images lie in \[0, 1\].*leave normalized_by"
    ):
        score([(x[:20], y[:20]), (x[20:], y[20:])])
    score(images)  # pixels, which are normalized for the model
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    score([((x - mean) / std, y)])
    score([(x / x.amax() * 0.3, y)])  # dark images may well be what they are said to be
    evaluate(net, [(x, y)], normalized_by=((0,) * 3, (1,) * 3))  # the same as none
    bright = dataclasses.replace(images, images=128 + images.images // 6)
    # Once it is normalized, all of it lies in [0, 1], but nobody has called it normalized.
    evaluate(net, bright, normalized_by=((0.5,) * 3, (0.2,) * 3))


def test_a_task_that_fails_leaves_the_figures_of_the_others(images):
    class Fussy(AnyShape):
        """Breaks where it is asked for gradients."""

        def forward(self, x):
            if x.requires_grad:
                raise RuntimeError("no such thing")
            return super().forward(x)

    net = Fussy((3, 32, 32), 10)
    done = evaluate(net, images, tasks=["accuracy", "fgsm", "calibration"])
    assert {r.task for r in done.results} == {"accuracy", "calibration"}
    assert done.failed == {"fgsm": "RuntimeError: no such thing"}
    with pytest.raises(
        ValueError, match=r"no result fgsm/top1_error \(RuntimeError: no such thing"
    ):
        done.value("fgsm", "top1_error")
    with pytest.raises(RuntimeError, match="no such thing"):
        evaluate(net, images, tasks=["fgsm", "accuracy"])


@pytest.mark.usefixtures("few_shapes")
def test_a_failed_task_is_told_on_the_command_line(tmp_path, capsys, monkeypatch, images):
    few = Sets(shapes("train", 8), images)
    train(recipe_on("shapes"), tmp_path / "run", sets=few, quiet=True)

    def fail(model, batches):
        raise RuntimeError("out of luck")

    failing = dataclasses.replace(TASKS["fgsm"], function=fail)
    monkeypatch.setitem(TASKS._entries, "fgsm", failing)
    args = ["evaluate", str(tmp_path / "run"), "--tasks", "calibration", "fgsm", "accuracy"]
    assert main([*args, "--device", "cpu", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "failed fgsm: RuntimeError: out of luck" in said.out
    assert "top1_error" in said.out
    assert "failed: fgsm; the other results are saved" in said.err


@pytest.mark.usefixtures("few_shapes")
def test_a_value_that_cannot_be_written_fails_its_task_alone(tmp_path, monkeypatch, images):
    train(recipe_on("shapes"), tmp_path / "run", sets=Sets(shapes("train", 8), images), quiet=True)

    def measure(model, batches):
        return [am.Result("fgsm", "top1_error", float("nan"))]

    monkeypatch.setitem(
        TASKS._entries, "fgsm", dataclasses.replace(TASKS["fgsm"], function=measure)
    )
    done = evaluate(tmp_path / "run", tasks=["accuracy", "fgsm", "calibration"], device="cpu")
    assert {result.task for result in done.results} == {"accuracy", "calibration"}
    assert "fgsm top1_error = nan" in done.failed["fgsm"]
    written = (tmp_path / "run" / "results.jsonl").read_text()
    assert '"calibration"' in written
    assert '"fgsm"' not in written


def test_noise_added_to_the_images_is_a_source_for_who_asks(two_tone, tmp_path):
    added = ["uniform-added", "gaussian-added"]
    assert not set(added) & set(sources_for("shapes"))
    score = partial(evaluate, Brightness(), tasks=["ood"], ood=added, data_root=tmp_path, seed=2)
    done = score(two_tone)
    assert {(r.settings["source"], r.settings["num_ood"]) for r in done.results} == {
        (name, 10) for name in added
    }
    assert {r.settings["seed"] for r in done.results} == {2}
    # White stays white under a sum that is clipped, black becomes noise.
    assert done.value("ood", "auroc", "uniform-added") == pytest.approx(75, abs=1)
    with pytest.raises(ValueError, match="uniform-added needs images to add noise to"):
        find_outliers("uniform-added", (3, 8, 8))


def test_more_of_what_users_may_get_wrong_is_explained(images):
    x, y = images.images.float() / 255, images.labels
    net = AnyShape((3, 32, 32), 10)
    with pytest.raises(ValueError, match=r"ood must be a list of names: write \['uniform'\]"):
        evaluate(net, images, tasks=["ood"], ood="uniform")
    with pytest.raises(ValueError, match=r"image 0: its boxes must be a tensor \[k, 4\], got \[\["):
        evaluate(net, [(x, y)], tasks=["localization"], boxes=[[[0, 0, 9, 9]]] * 40)
    for wrong in ((0.5, 0.5), (0.5,) * 3, 0.5, ("a", "b")):
        with pytest.raises(ValueError, match=r"normalized_by must be \(mean, std\).*got "):
            evaluate(net, images, normalized_by=wrong)
    with torch.inference_mode(), pytest.raises(ValueError, match="disables: call it outside"):
        evaluate(net, images, tasks=["fgsm"])
    with pytest.raises(ValueError, match="got ndarray"):
        evaluate(net, [(x.numpy(), y)])
