"""A run from recipe to results: what is written, what is refused, what is scored."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

import alignmixup as am
from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.layout import is_gone
from alignmixup.experiments import styling
from alignmixup.experiments.accuracies import Evaluator, record_accuracy
from alignmixup.experiments.batches import load_split, shortened
from alignmixup.experiments.data_record import Sets, checksum
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import train
from alignmixup.experiments.run_folder import append_results, read_recipe
from alignmixup.experiments.scoring import evaluate
from alignmixup.experiments.styling import make_style_weights, with_style_weights
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.models.zoo import NetSpec
from alignmixup.ops.adain import load_adain, save_adain, small_adain
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import DataSpec, Recipe, changed, limited, on_data
from alignmixup.report.reading import read_results
from alignmixup.training import Stopped, TrainSettings
from alignmixup.training.adain_fit import class_style_distances
from alignmixup.training.ledger import LEDGER, read_ledger
from alignmixup.training.settings import differences
from picture_folder import make_pictures

RECIPE = Recipe(
    key=RecipeKey("shapes", "r18", "alignmixup"),
    data=DataSpec("shapes"),
    net=NetSpec("preact_resnet18", width=4),
    mixer=AlignMixup("layer4", num_iters=10),
    train=TrainSettings(
        epochs=2, batch_size=16, lr=0.02, schedule="cosine", milestones=(), device="cpu"
    ),
)


@pytest.fixture(scope="module")
def sets():
    return Sets(shapes("train", 48), shapes("test", 40))


@pytest.fixture(scope="module")
def finished(sets, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    train(RECIPE, out, sets=sets, quiet=True)
    return out


def test_a_finished_run_has_its_accuracies_with_where_they_come_from(finished):
    results = read_results([finished])
    figures = {r.metric: r for r in results if r.task == "accuracy" and r.metric != "top1"}
    assert set(figures) == {"top1_best", "top1_last"}  # too short for a median of ten epochs
    for result in figures.values():
        assert (result.key, result.seed, result.epoch) == (RECIPE.key, 0, 2)
        assert result.trained == {
            "mixer": "AlignMixup",
            "mixer.num_iters": 10,
            "data.name": "shapes",
            "net.name": "preact_resnet18",
            "net.width": 4,
            "train.epochs": 2,
            "train.batch_size": 16,
            "train.lr": 0.02,
            "train.schedule": "cosine",
            "train.milestones": [],
        }
        assert torch.__version__ in result.version
        assert result.date
        assert result.hardware


def test_training_a_finished_run_again_changes_nothing(finished, sets, capsys):
    before = {p.name: p.read_bytes() for p in finished.iterdir()}
    train(RECIPE, finished, sets=sets)
    assert {p.name: p.read_bytes() for p in finished.iterdir()} == before
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "already finished: 2 of 2 epochs\n")


def test_a_second_process_in_the_folder_is_refused_before_anything_is_loaded(
    finished, sets, monkeypatch, capsys
):
    fcntl = pytest.importorskip("fcntl")
    with (finished / "run.json").open("rb") as held:  # as the first one does
        fcntl.flock(held, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.delattr("alignmixup.experiments.run.DataRecord")
            with pytest.raises(ValueError, match="another process is training in"):
                train(RECIPE, finished, sets=sets)
    assert capsys.readouterr().out == ""
    train(RECIPE, finished, sets=sets, quiet=True)


def test_the_ledger_opens_with_the_alignment_effect(finished):
    events = {e["event"]: e for e in read_ledger(finished / LEDGER)}
    effect = events["alignment_effect"]
    assert effect["layer"] == "layer4"
    assert effect["logits"] < 1e-3 < effect["features"]


def test_train_says_in_one_line_when_alignment_is_next_to_nothing(sets, tmp_path, capsys):
    one = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, epochs=1))
    train(one, tmp_path / "pool", sets=sets)
    assert "next to nothing" in capsys.readouterr().out
    released = dataclasses.replace(one, mixer=AlignMixup.released())
    train(released, tmp_path / "released", sets=sets)
    out = capsys.readouterr().out
    assert "the plan of feat' does not keep the mean over positions" in out
    assert "trains as an unaligned one" not in out
    flat = dataclasses.replace(one, net=dataclasses.replace(one.net, head="flatten"))
    train(flat, tmp_path / "flat", sets=sets)
    assert "next to nothing" not in capsys.readouterr().out


@pytest.mark.parametrize("softmax", [True, False])
def test_train_says_once_that_a_network_returns_a_softmax(sets, tmp_path, capsys, softmax):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    net(sets.train.images[:1].float())
    net = torch.nn.Sequential(*net, *([torch.nn.Softmax(dim=1)] if softmax else []))
    recipe = dataclasses.replace(ONE, mixer=NoMix())
    for _ in range(2):  # the second call resumes
        train(recipe, tmp_path, sets=sets, model=net, changes={"train.epochs": 1})
    assert capsys.readouterr().out.count("note: the network returns probab") == softmax


ONE = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, epochs=1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"recipe": torch.nn.Flatten()},
            "got the module Flatten: pass a module of your own as",
        ),
        ({"recipe": 3}, "recipe must be a Recipe or the name of one, got 3"),
        ({"out": None}, "out must be the path of a folder, got None"),
        ({"out": ""}, "out must be the path of a folder, got ''"),
        ({"changes": ["train.epochs=1"]}, r"changes must be a dict .* got \['train.epochs=1'\]"),
        ({"changes": {1: 2}}, "unknown setting 1"),
        ({"data_root": 3}, "data_root must be the path of a folder, got 3"),
        ({"sets": (1, 2)}, r"sets must be .*Sets\(train, test\) of two ImageSets, got tuple"),
    ],
)
def test_arguments_of_other_types_are_named(change, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        am.train(**{"recipe": RECIPE, "out": tmp_path / "run", "quiet": True, **change})
    assert not (tmp_path / "run").exists()


def test_sets_of_other_things_or_of_two_kinds_of_classes_are_refused(sets):
    with pytest.raises(ValueError, match="train must be an ImageSet, got list"):
        Sets([sets.train], sets.test)
    other = dataclasses.replace(sets.test, class_names=tuple("0123456789"))
    with pytest.raises(ValueError, match="must have the same class_names"):
        Sets(sets.train, other)


def test_one_class_alone_is_refused(tmp_path):
    """It trained to 100 %: mostly a folder named one level too high."""
    name = make_pictures(tmp_path / "pets", num_train=4)
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / "pets" / split / "dark")
    with pytest.raises(ValueError, match=r"pets has 1 class \(light\), and a classifier needs two"):
        train(on_data(find_recipe("cifar10-r18-baseline-fast"), name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sets_that_are_empty_or_of_two_sizes_are_refused(sets):
    test = dataclasses.replace(sets.test, boxes=None)
    empty = dataclasses.replace(test, images=test.images[:0], labels=test.labels[:0])
    with pytest.raises(ValueError, match=rf"{empty.name}/{empty.split} has no image"):
        Sets(sets.train, empty)
    small = dataclasses.replace(test, images=test.images[:, :, ::2, ::2])
    with pytest.raises(ValueError, match=r"must have one size, got .* for training and .* test"):
        Sets(sets.train, small)


def renamed(sets, name, class_names):
    return Sets(
        *(
            dataclasses.replace(s, name=name, class_names=class_names)
            for s in (sets.train, sets.test)
        )
    )


def test_a_run_on_given_sets_is_recorded_as_theirs_and_scored_on_no_others(tmp_path, sets):
    """It was recorded as the recipe's data, and scored on these in silence."""
    mine = renamed(sets, "mine", tuple("abcdefghij"))
    train(ONE, tmp_path, sets=mine, quiet=True)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["key"]["data"], record["data"]["name"]) == ("mine", "mine")
    assert record["base"] == dataclasses.asdict(RECIPE.key)
    assert {r.key.name for r in read_results([tmp_path])} == {"mine-r18-alignmixup"}
    assert {r.trained["data.name"] for r in read_results([tmp_path])} == {"mine"}
    with pytest.raises(ValueError, match=r"sets= \(.mine., 40 test images\), which cannot be"):
        evaluate(tmp_path, device="cpu")
    assert evaluate(tmp_path, mine.test, device="cpu").value("accuracy", "top1") >= 0
    fewer = dataclasses.replace(mine.test, class_names=tuple("abcdefghijk"))
    with pytest.raises(
        ValueError, match=r"on 10 classes \(..., j\), mine has 11 classes \(..., j, k\)"
    ):
        evaluate(tmp_path, fewer, device="cpu")


@pytest.mark.usefixtures("few_shapes")
def test_given_sets_with_the_name_of_a_data_set_are_told_from_it(tmp_path, sets):
    train(ONE, tmp_path / "few", sets=Sets(sets.train, shapes("test", 30)), quiet=True)
    with pytest.raises(ValueError, match=r"30 test images.*which differ from 40 of shapes"):
        evaluate(tmp_path / "few", device="cpu")
    # All of them: they can be loaded.
    train(ONE, tmp_path / "all", sets=sets, quiet=True)
    done = evaluate(tmp_path / "all", device="cpu")
    assert done.results[0].settings["num_images"] == 40


def test_a_run_is_resumed_on_its_own_images_only(tmp_path, sets):
    train(ONE, tmp_path, sets=sets, quiet=True)
    other = renamed(sets, "shapes", tuple("abcdefghij"))
    with pytest.raises(ValueError, match=r"holds a run on other images \(class_names"):
        train(ONE, tmp_path, sets=other, quiet=True)


def test_a_run_resumed_on_more_or_fewer_images_says_so(tmp_path, sets):
    folder = tmp_path / "pictures"
    make_pictures(folder, num_train=20, num_val=4)
    small = {"net.width": 2, "data.pad": 0}
    recipe = changed(on_data(dataclasses.replace(ONE, mixer=NoMix()), f"folder:{folder}@8"), small)
    train(recipe, tmp_path / "run", quiet=True)
    next((folder / "train").rglob("*.png")).unlink()
    longer = changed(recipe, {"train.epochs": 2})
    named = r"begun with 40 training and 8 test images, and pictures has 39 and 8 now"
    with pytest.warns(UserWarning, match=named):
        train(longer, tmp_path / "run", extend=True, quiet=True)


def on_pictures(folder):
    recipe = on_data(dataclasses.replace(ONE, mixer=NoMix()), f"folder:{folder}@8")
    return changed(recipe, {"net.width": 2, "data.pad": 0})


@pytest.fixture
def moved(tmp_path):
    """The folder of a run, and the place to which the folder of its images has moved."""
    make_pictures(tmp_path / "pictures", num_train=8)
    train(on_pictures(tmp_path / "pictures"), tmp_path / "run", quiet=True)
    (tmp_path / "pictures").rename(tmp_path / "moved")
    return tmp_path / "run", tmp_path / "moved"


def test_where_the_folder_of_images_has_moved_the_error_says_what_to_do(moved):
    remedy = r"no folder .* repeat the training command with --dataset folder:NEW, .*, or "
    with pytest.raises(FileNotFoundError, match=remedy + ".* with --dataset$"):
        evaluate(moved[0], tasks=["accuracy"], device="cpu")
    with pytest.raises(FileNotFoundError, match=remedy + "pass the training images"):
        load_run(moved[0], device="cpu").with_clean_statistics()


def test_a_run_goes_on_where_its_folder_of_images_has_moved(moved):
    run, place = moved
    top1 = load_run(run, device="cpu").summary.last
    longer = changed(on_pictures(place), {"train.epochs": 2})
    with pytest.raises(ValueError, match=r"\(train.epochs: 1 before, 2 now\)"):
        train(longer, run, quiet=True)
    assert train(on_pictures(place), run, quiet=True).summary.last == top1  # nothing is trained
    record = json.loads((run / "run.json").read_text())
    assert record["data"]["name"] == f"folder:{place}@8"
    assert record["images"]["name"] == "moved"
    assert record["key"]["data"] == "folder_pictures_8"
    assert evaluate(run, device="cpu").value("accuracy", "top1") == top1
    trained_on = {result.trained["data.name"] for result in read_results([run])}
    assert trained_on == {f"folder:{place.with_name('pictures')}@8"}  # one row of a report
    assert train(longer, run, extend=True, quiet=True).epoch == 2
    again = changed(on_pictures(place.rename(place.with_name("again"))), {"train.epochs": 2})
    assert train(again, run, quiet=True).epoch == 2
    assert json.loads((run / "run.json").read_text())["first_data"] == trained_on.pop()


@pytest.mark.parametrize("what", ["fewer", "other"])
def test_a_run_goes_on_with_no_other_images_where_its_own_are_gone(moved, what):
    run, place = moved
    before = (run / "run.json").read_bytes()
    if what == "fewer":
        next((place / "val").rglob("*.png")).unlink()
    else:
        for split in ("train", "val"):
            (place / split / "dark").rename(place / split / "black")
    named = {"fewer": "num_test: 8 before, 7 now", "other": "class_names: .*black"}[what]
    with pytest.raises(ValueError, match=rf"holds a run on other images \({named}"):
        train(on_pictures(place), run, quiet=True)
    assert (run / "run.json").read_bytes() == before


def test_shards_that_have_moved_are_found_again(tmp_path):
    make_pictures(tmp_path / "pictures", num_train=8)
    main(["data", "shard", f"folder:{tmp_path / 'pictures'}", str(tmp_path / "shards")])

    def run_on(place):
        recipe = on_data(dataclasses.replace(ONE, mixer=NoMix()), f"shards:{place}@8")
        return train(changed(recipe, {"net.width": 2}), tmp_path / "run", quiet=True)

    run_on(tmp_path / "shards")
    (tmp_path / "shards").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="command with --dataset shards:NEW, which"):
        evaluate(tmp_path / "run", device="cpu")
    top1 = run_on(tmp_path / "moved").summary.last
    assert evaluate(tmp_path / "run", device="cpu").value("accuracy", "top1") == top1
    assert not is_gone(f"shards:{tmp_path}/moved/{{split}}-*.tar")
    assert is_gone(f"shards:{tmp_path}/shards/{{split}}-*.tar@8")


def test_a_folder_of_images_that_is_still_there_has_not_moved(moved):
    run, place = moved
    shutil.copytree(place, place.with_name("pictures"))
    with pytest.raises(ValueError, match=r"with other settings \(data.name: "):
        train(on_pictures(place), run, quiet=True)


@dataclasses.dataclass(frozen=True)
class Unregistered(NoMix):
    """A mixer without @register_mixer."""


@dataclasses.dataclass(frozen=True)
class Unrecordable(NoMix):
    where: Path = Path("weights")


NoMixToo = dataclasses.make_dataclass("NoMix", [], bases=(NoMix,), frozen=True)


@pytest.mark.parametrize(
    ("mixer", "named"),
    [
        (Unregistered(), r"^the mixer Unregistered is not registered, .* write @register_mixer"),
        (NoMixToo(), r"^the mixer NoMix of \S+ is not the registered one of alignmixup\.mixers\."),
        (am.OneOf((Unregistered(), NoMix())), r"^the mixer Unregistered is not registered"),
        (Unrecordable(), r"cannot be recorded \(Object of type PosixPath .*: use numbers, text"),
    ],
)
def test_a_mixer_that_could_not_be_read_again_is_refused_at_once(tmp_path, sets, mixer, named):
    """It was trained to its last epoch, and could not be opened then."""
    am.register_mixer(Unrecordable)
    with pytest.raises(ValueError, match=named):
        train(dataclasses.replace(ONE, mixer=mixer), tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Elsewhere(NoMix):
    """Draws from Python's generator, which no checkpoint has, or gives no Draw."""

    what: str = "lam"

    def draw(self, batch_size, rng, progress=0.0):
        made = super().draw(batch_size, rng, progress)
        share = torch.tensor(random.random())
        return dataclasses.replace(made, lam=share) if self.what == "lam" else (made.perm, share)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lam", r"^Elsewhere\.draw gave another lam from the same rng: draw all of it from rng"),
        ("tuple", r"^Elsewhere\.draw must return a Draw\(case, perm, lam\), got tuple$"),
    ],
)
def test_draws_that_a_resumed_run_could_not_repeat_are_named(tmp_path, sets, what, named):
    am.register_mixer(Elsewhere)
    with pytest.raises(ValueError, match=named):
        train(dataclasses.replace(ONE, mixer=Elsewhere(what=what)), tmp_path, sets=sets, quiet=True)


@pytest.mark.parametrize(
    ("member", "value", "named"),
    [
        ("attach", lambda self, net: self, "is called with (net, x), which it does not take"),
        ("draw", lambda self, size: None, "is called with (batch_size, rng, progress), which"),
        ("draw", lambda self, n, rng, progress: None, "is called with (batch_size, rng), which"),
        ("apply", lambda self, net: None, "is called with (net, x, y, draw), which it does not"),
        ("cases", ["clean"], "must be a dict of the probability of each case, got ['clean']"),
    ],
)
def test_members_of_a_mixer_that_cannot_be_used_are_named(tmp_path, sets, member, value, named):
    """They were tracebacks."""
    kind = dataclasses.dataclass(frozen=True)(type("Mine", (NoMix,), {member: value}))
    am.register_mixer(kind)
    with pytest.raises(ValueError, match=rf"^Mine\.{member} {re.escape(named)}"):
        train(dataclasses.replace(ONE, mixer=kind()), tmp_path, sets=sets, quiet=True)


def test_a_run_opens_without_its_data(finished, sets):
    run = load_run(finished, device="cpu")
    assert run.data.class_names == sets.train.class_names
    assert (run.data.name, run.data.image_size) == ("shapes", 32)
    assert (run.data.mean, run.data.std) == (sets.train.mean, sets.train.std)
    assert (run.data.num_train, run.data.num_test) == (48, 40)
    assert run.model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_a_run_of_an_older_version_opens_and_resumes(finished, sets, tmp_path):
    for file in finished.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    record = json.loads((tmp_path / "run.json").read_text())
    del record["images"], record["data"]["limit"], record["key"], record["base"]
    record["name"] = "demo-alignmixup"
    record["train"] |= {"compile": True, "capture": False, "channels_last": True}
    record["train"]["precision"] = "float32"
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="recorded no classes: pass num_classes and image_size"):
        load_run(tmp_path, device="cpu")
    old = load_run(tmp_path, num_classes=10, image_size=32, device="cpu")
    assert old.class_names == tuple("0123456789")
    assert old.predict(sets.test.images).probabilities.shape == (40, 10)
    # Before there were keys: one of its settings, and its old name.
    key = RecipeKey("shapes", "preact_resnet18", "AlignMixup", "demo-alignmixup")
    assert (old.recipe.key, old.recipe.base) == (key, None)
    assert train(RECIPE, tmp_path, sets=sets, quiet=True).summary.is_complete
    done = evaluate(old.folder, sets.test, device="cpu")
    assert {result.key for result in done.results} == {key}


def make_folder(root, size=20):
    colors = {"cat": (200, 30, 30), "dog": (30, 30, 200)}
    for split, (name, color) in itertools.product(("train", "val"), colors.items()):
        folder = root / split / name
        folder.mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (size, size), color).save(folder / f"{i}.png")


def test_a_relative_folder_is_evaluated_and_resumed_from_another_directory(tmp_path, monkeypatch):
    make_folder(tmp_path / "here" / "pets")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small = dataclasses.replace(ONE.train, batch_size=4)
    recipe = on_data(dataclasses.replace(ONE, train=small), "folder:pets@16")
    train(recipe, "run", quiet=True)
    monkeypatch.chdir(tmp_path / "there")
    run = tmp_path / "here" / "run"
    data = load_run(run, device="cpu").data
    assert (data.class_names, data.image_size) == (("cat", "dog"), 16)
    assert evaluate(run, device="cpu").value("accuracy", "top1") >= 0
    # Passed as sets, they are known again.
    both = Sets(*(load_split(recipe.data, split, None) for split in ("train", "test")))
    train(recipe, "given", sets=both, quiet=True)
    assert read_recipe(Path("given")) == recipe
    assert evaluate("given", device="cpu").value("accuracy", "top1") >= 0
    # The same folder by another path is the same run.
    again = on_data(dataclasses.replace(ONE, train=small), "folder:../here/pets@16")
    assert train(again, run, quiet=True).summary.is_complete


def test_classes_that_have_changed_on_disk_are_refused(tmp_path):
    make_folder(tmp_path / "pets")
    small = dataclasses.replace(ONE.train, batch_size=4)
    recipe = on_data(dataclasses.replace(ONE, train=small), f"folder:{tmp_path / 'pets'}@16")
    train(recipe, tmp_path / "run", quiet=True)
    for split in ("train", "val"):
        (tmp_path / "pets" / split / "dog").rename(tmp_path / "pets" / split / "ape")
    with pytest.raises(
        ValueError, match=r"2 classes \(cat, dog\), pets has 2 classes \(ape, cat\)"
    ):
        evaluate(tmp_path / "run", device="cpu")


def test_fewer_images_than_a_batch_are_refused(tmp_path, sets):
    """They trained as one step, recorded with the batch size of the settings."""
    with pytest.raises(ValueError, match=r"48 training images make no full batch of 128: set --tr"):
        train(RECIPE, tmp_path / "run", sets=sets, changes={"train.batch_size": 128}, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_limit_shortens_any_set_and_is_in_the_name_of_its_results(tmp_path, sets):
    train(ONE, tmp_path, sets=sets, changes={"data.limit": 20}, quiet=True)
    results = read_results([tmp_path])
    assert {r.key.name for r in results} == {"shapes-r18-alignmixup-limit20"}
    assert {r.trained["data.limit"] for r in results} == {20}
    data = load_run(tmp_path, device="cpu").data
    assert (data.num_train, data.num_test) == (20, 20)
    assert changed(limited(RECIPE, 20), {"data.limit": None}) == RECIPE
    with pytest.raises(ValueError, match="limit must be at least 1"):
        limited(RECIPE, 0)


def test_the_images_of_a_limit_are_of_all_classes_in_their_order(sets, tmp_path):
    few = shortened(sets.train, 20)
    assert few.labels.bincount().tolist() == [2] * 10
    rows = [
        int((sets.train.images == image).flatten(1).all(1).nonzero()[0]) for image in few.images
    ]
    assert rows == sorted(rows)
    assert all(torch.equal(few.boxes[i], sets.train.boxes[row]) for i, row in enumerate(rows))
    assert shortened(sets.train, 48) is sets.train
    make_folder(tmp_path)
    files = load_split(DataSpec(f"folder:{tmp_path}@16", stream=True, limit=2), "train", None)
    assert [path.split("/")[-2] for path in files.paths] == ["cat", "dog"]


def test_a_run_too_short_for_its_schedule_trains_and_says_what_is_cut(tmp_path, sets, capsys):
    schedule = {"train.warmup_epochs": 5.0, "train.schedule": "step", "train.milestones": (500,)}
    train(ONE, tmp_path, sets=sets, changes={**schedule, "train.epochs": 2})
    said = capsys.readouterr().out
    assert "a warm-up of 5 epochs does not fit into 2: it is cut to 1" in said
    assert "[500] lie beyond the last epoch" in said
    assert json.loads((tmp_path / "run.json").read_text())["train"]["warmup_epochs"] == 1.0


def test_a_run_that_has_saved_nothing_gives_way_to_other_settings(tmp_path, sets):
    def fail(net):
        raise OSError("out of disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "__call__", lambda self, net: fail(net))
        with pytest.raises(OSError, match="out of disk"):
            train(RECIPE, tmp_path, sets=sets, quiet=True)
    assert (tmp_path / "run.json").exists()
    (tmp_path / "adain.safetensors").write_bytes(b"of other images")
    other = dataclasses.replace(ONE, mixer=NoMix())
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "run.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is training in"):
            train(other, tmp_path, sets=sets, quiet=True)
    assert train(other, tmp_path, sets=sets, quiet=True).epoch == 1
    assert load_run(tmp_path, device="cpu").recipe == other
    assert not (tmp_path / "adain.safetensors").exists()
    assert {r.trained["mixer"] for r in read_results([tmp_path])} == {"NoMix"}


def test_the_results_of_a_run_name_each_precision_it_was_trained_in(tmp_path, sets, monkeypatch):
    class Once:
        calls = 0

        def __call__(self, evaluator, net):
            Once.calls += 1
            if Once.calls == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"top1": 10.0}

    once = Once()
    monkeypatch.setattr(Evaluator, "__call__", lambda self, net: once(self, net))
    with pytest.raises(Stopped):
        train(RECIPE, tmp_path, sets=sets, changes={"train.precision": "bf16"}, quiet=True)
    train(RECIPE, tmp_path, sets=sets, changes={"train.precision": "float32"}, quiet=True)
    trained = {r.trained["train.precision"] for r in read_results([tmp_path])}
    assert trained == {"bf16, float32 from epoch 2"}


def test_a_run_that_is_extended_in_another_precision_names_both(tmp_path, sets):
    train(RECIPE, tmp_path, sets=sets, changes={"train.precision": "bf16"}, quiet=True)
    longer = {"train.precision": "float32", "train.epochs": RECIPE.train.epochs + 1}
    train(RECIPE, tmp_path, sets=sets, changes=longer, extend=True, quiet=True)
    last = read_results([tmp_path])[-1]
    assert last.trained["train.precision"] == f"bf16, float32 from epoch {last.epoch}"


def test_a_stopped_run_that_is_complete_has_its_results(tmp_path, sets, monkeypatch):
    def last(self, net):
        os.kill(os.getpid(), signal.SIGINT)
        return {"top1": 10.0}

    monkeypatch.setattr(Evaluator, "__call__", last)
    with pytest.raises(Stopped):
        train(ONE, tmp_path, sets=sets, quiet=True)
    assert {r.metric for r in read_results([tmp_path])} == {"top1_last", "top1_best"}


def test_the_folder_of_another_recipe_is_refused_and_the_difference_named(finished, sets):
    other = dataclasses.replace(RECIPE, mixer=NoMix())
    with pytest.raises(ValueError, match=r"mixer\.kind: AlignMixup before, NoMix now"):
        train(other, finished, sets=sets, quiet=True)
    with pytest.raises(ValueError, match=r"train\.epochs: 2 before, 5 now"):
        train(RECIPE, finished, sets=sets, changes={"train.epochs": 5}, quiet=True)
    # Where and how often it is computed is free.
    train(RECIPE, finished, sets=sets, changes={"train.eval_every": 3}, quiet=True)


def test_another_method_is_named_without_the_settings_of_both():
    one, other = (find_recipe(f"cifar10-r18-{name}-fast") for name in ("alignmixup", "cutmix"))
    found = differences(one.to_json(), other.to_json())
    assert [line for line in found if line.startswith("mixer")] == [
        "mixer.kind: AlignMixup before, CutMix now"
    ]


def test_what_fails_before_training_leaves_no_run_behind(tmp_path, sets):
    broken = dataclasses.replace(RECIPE, net=NetSpec("wrn16_8", stem_norm=False))
    with pytest.raises(ValueError, match="stem_norm"):
        train(broken, tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_killed_while_it_claimed_its_folder_can_start_again(tmp_path, sets):
    (tmp_path / "run.json.partial").write_text("{")
    one = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, epochs=1))
    assert train(one, tmp_path, sets=sets, quiet=True).summary.is_complete


def test_a_folder_with_other_things_in_it_is_refused(tmp_path, sets):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds no run; choose another folder, out= or --out$"):
        train(RECIPE, tmp_path, sets=sets, quiet=True)


def test_a_run_read_back_gives_the_accuracy_it_recorded(finished, sets):
    recorded = {r.metric: r.value for r in read_results([finished])}
    run = load_run(finished, device="cpu")
    x, y = sets.test.images.float() / 255, sets.test.labels
    with torch.no_grad():
        top1 = 100 * float((run.model(x).argmax(1) == y).float().mean())
    assert top1 == pytest.approx(recorded["top1_last"])
    assert run.recipe == RECIPE
    assert run.epoch == 2


def test_evaluate_scores_a_run_and_appends(finished, sets):
    before = len(read_results([finished]))
    done = am.evaluate(finished, sets.test, tasks=["accuracy", "fgsm", "calibration"], device="cpu")
    assert done.value("accuracy", "top1") == pytest.approx(
        next(r.value for r in read_results([finished]) if r.metric == "top1_last")
    )
    assert done.value("fgsm", "top1_error") >= done.value("fgsm", "clean_error") - 1e-9
    assert len(read_results([finished])) == before + len(done.results)
    assert {r.key.name for r in done.results} == {"shapes-r18-alignmixup"}


def test_localization_cost_and_noise_come_with_the_data(finished, tmp_path):
    tasks = ["localization", "cost", "ood"]
    options = {"cost": {"num_steps": 2, "num_warmup": 1}}
    few = {"device": "cpu", "data_root": tmp_path, "options": options}
    done = evaluate(finished, shapes("test", 10), tasks=tasks, **few)
    absent = ("lsun-crop", "lsun-resize", "isun", "tiny-crop", "tiny-resize")
    assert set(done.left_out) == {f"ood {name}" for name in absent}
    for metric in ("top1_loc", "gt_known_loc", "maxboxacc", "maxboxacc_v2"):
        assert 0 <= done.value("localization", metric) <= 100
    assert done.value("localization", "top1_loc") <= done.value("localization", "gt_known_loc")
    net = load_run(finished, device="cpu").model
    params = sum(p.numel() for p in net.parameters()) / 1e6
    assert done.value("cost", "params") == pytest.approx(params)
    assert done.value("cost", "ms_per_batch") > 0
    assert {r.settings["source"] for r in done.results if r.task == "ood"} == {
        "uniform",
        "gaussian",
    }


def test_what_the_data_do_not_allow_is_left_out_with_its_reason(finished, sets):
    boxless = dataclasses.replace(sets.test, boxes=None)
    done = evaluate(finished, boxless, tasks=["localization", "accuracy"], device="cpu")
    assert done.left_out == {"localization": "no image has a box"}
    assert done.value("accuracy", "top1") >= 0


def test_the_same_seed_gives_the_same_figures(finished):
    few = shapes("test", 10)
    values = [
        [r.value for r in evaluate(finished, few, tasks=["pgd"], seed=s, device="cpu").results]
        for s in (3, 3)
    ]
    assert values[0] == values[1]


def test_a_users_module_is_scored_too(sets):
    class Always3(torch.nn.Module):
        def forward(self, x):
            return torch.eye(10, device=x.device)[3].expand(len(x), 10) * 5

    done = am.evaluate(Always3(), sets.test, tasks=["accuracy"])
    share = 100 * float((sets.test.labels == 3).float().mean())
    assert done.value("accuracy", "top1") == pytest.approx(share)
    with pytest.raises(ValueError, match="pass an ImageSet"):
        am.evaluate(Always3())
    with pytest.raises(ValueError, match=r"the folder of a run or an nn\.Module, got function"):
        am.evaluate(lambda x: x, sets.test)
    with pytest.raises(ValueError, match="unknown task 'accurracy'"):
        am.evaluate(Always3(), sets.test, tasks=["accurracy"])
    with pytest.raises(ValueError, match="no result fgsm/top1_error"):
        done.value("fgsm", "top1_error")


def test_a_run_scored_before_its_end_still_records_its_accuracies(tmp_path, sets, finished):
    """A figure of the middle must not be taken for those of the end."""
    for name in ("run.json", "checkpoint.safetensors", LEDGER):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    evaluate(tmp_path, sets.test, device="cpu")
    train(RECIPE, tmp_path, sets=sets, quiet=True)
    metrics = [r.metric for r in read_results([tmp_path])]
    assert {"top1_best", "top1_last"} <= set(metrics)
    assert len(metrics) == len(set(metrics))


def test_the_accuracies_of_a_teacher_are_recorded_too(tmp_path, finished):
    """From the lines that training with a teacher writes into the ledger."""
    lines = [json.loads(line) for line in (finished / LEDGER).read_text().splitlines()]
    teacher = iter((40.0, 35.0))
    for line in lines:
        if "test" in line:
            line["test_teacher"] = {"top1": next(teacher), "top5": 90.0}
    (tmp_path / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_bytes((finished / "run.json").read_bytes())
    record_accuracy(RECIPE, tmp_path)
    found = {r.metric: r.value for r in read_results([tmp_path / "results.jsonl"])}
    assert {"top1_last", "top1_best"} < found.keys()
    assert (found["teacher_top1_last"], found["teacher_top1_best"]) == (35.0, 40.0)


def test_a_line_cut_short_does_not_spoil_those_behind_it(tmp_path, sets, finished):
    for file in finished.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:100])  # killed, or the disk was full
    train(RECIPE, tmp_path, sets=sets, quiet=True)
    metrics = [r.metric for r in read_results([tmp_path])]
    assert metrics == ["top1_last", "top1_best"]
    path.write_text(path.read_text()[:-1])  # whole but for its end: nothing goes
    evaluate(tmp_path, sets.test, device="cpu")
    assert [r.metric for r in read_results([tmp_path])][:2] == metrics


def test_a_file_of_results_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*results\.jsonl"):
        append_results(tmp_path, [am.Result("accuracy", "top1", 1.0)])


def test_a_file_in_the_place_of_the_folder_is_named_before_anything_is_loaded(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ValueError, match=r"out \(--out\) must be a folder; .*run is a file"):
        train(RECIPE, tmp_path / "run", data_root=tmp_path / "nowhere", quiet=True)


def test_a_folder_that_safetensors_cannot_read_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"out \(--out\) must be a path in UTF-8.*udcff"):
        am.train("cifar10-r18-input-fast", tmp_path / os.fsdecode(b"run\xff"), quiet=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, sets):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot write .*run: Not a directory"):
        train(RECIPE, tmp_path / "file" / "run", sets=sets, quiet=True)


@pytest.mark.slow
def test_every_result_says_which_style_weights_were_used(tmp_path, sets):
    path = tmp_path / "style.safetensors"
    made = make_style_weights("shapes", path, steps=4, num_images=60, width=3, seed=0).weights
    settings = dataclasses.replace(RECIPE.train, epochs=1)
    recipe = dataclasses.replace(RECIPE, mixer=StyleMix(weights=str(path)), train=settings)
    run = tmp_path / "run"
    train(recipe, run, sets=sets, quiet=True)
    path.unlink()  # what was used stays known
    evaluate(run, sets.test, tasks=["calibration"], device="cpu")
    results = read_results([run])
    assert {r.task for r in results} == {"accuracy", "calibration"}
    for result in results:
        assert result.trained["mixer.weights"] == "small"
        assert result.trained["style_weights"]["sha256"] == made.sha256
        assert str(tmp_path) not in result.to_json().replace(result.command, "")


def test_style_weights_that_cannot_be_read_leave_no_run_behind(tmp_path, sets):
    (tmp_path / "style.safetensors").write_bytes(b"not the weights of a style network")
    mixer = StyleMix(str(tmp_path / "style.safetensors"))
    with pytest.raises(ValueError, match=r"style\.safetensors is damaged or no \.safetensors file"):
        train(dataclasses.replace(RECIPE, mixer=mixer), tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_checksum_of_files_takes_names_of_any_bytes():
    names = (b"caf\xe9.png", "caf\u00e9.png".encode(), b"cafe.png")  # latin1, UTF-8, ASCII
    files = [FileSet("a", "test", (os.fsdecode(n),), torch.tensor([0]), ("a", "b")) for n in names]
    assert len({checksum(each) for each in files}) == 3


def test_style_weights_with_another_checksum_leave_no_run_behind(tmp_path, sets):
    path = tmp_path / "style.safetensors"
    make_style_weights("shapes", path, steps=4, num_images=60, width=3)
    recipe = dataclasses.replace(RECIPE, mixer=StyleMix(str(path), sha256="0" * 64))
    with pytest.raises(ValueError, match=r"has sha256 .*, expected 0000"):
        train(recipe, tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


def test_style_weights_without_distances_leave_no_run_of_automatic_gamma_behind(tmp_path, sets):
    path = tmp_path / "style.safetensors"
    save_adain(small_adain(2, torch.Generator().manual_seed(0)), path)
    recipe = dataclasses.replace(RECIPE, mixer=StyleCutMix(str(path), gamma="auto"))
    with pytest.raises(ValueError, match="hold no class distances, which gamma='auto' needs"):
        train(recipe, tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_automatic_gamma_without_weights_gets_the_distances_of_the_training_set(
    tmp_path, sets, monkeypatch
):
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    settings = dataclasses.replace(RECIPE.train, epochs=1)
    mixer = StyleCutMix(prob=1.0, gamma="auto")
    train(
        dataclasses.replace(RECIPE, mixer=mixer, train=settings),
        tmp_path / "run",
        sets=sets,
        quiet=True,
    )
    made = load_adain(tmp_path / "run" / "adain.safetensors")
    assert made.class_distances is not None
    expected = class_style_distances(made, sets.train.images, sets.train.labels, 10)
    off_diagonal = expected.sum() / 90
    torch.testing.assert_close(made.class_distances, expected / off_diagonal)
    (metadata,) = {
        json.dumps(r.trained["style_weights"]["metadata"]) for r in read_results([tmp_path / "run"])
    }
    assert json.loads(metadata) == {
        "data": "shapes/train",
        "num_images": str(len(sets.train)),
        "steps": "2",
        "seed": str(settings.seed),
        "width": "32",
    }


def test_of_streamed_files_every_class_has_its_share_in_the_style_network(tmp_path, monkeypatch):
    for split, (name, count) in itertools.product(("train", "val"), {"cat": 9, "dog": 1}.items()):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 20), (25 * i, 80, 160)).save(folder / f"{i}.png")
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    monkeypatch.setattr(styling, "ADAIN_IMAGES", 4)
    spec = DataSpec(f"folder:{tmp_path / 'data'}@16", stream=True)
    recipe = dataclasses.replace(RECIPE, data=spec, mixer=StyleCutMix(gamma="auto"))
    files = load_split(spec, "train", None)
    mixer = with_style_weights(recipe, files, tmp_path, torch.device("cpu"))
    assert mixer.describe()["metadata"]["num_images"] == "4"
    assert mixer.network(torch.device("cpu")).class_distances.shape == (2, 2)


def test_a_run_says_that_it_trains_a_style_network_first(tmp_path, monkeypatch, sets, capsys):
    """Thousands of steps on a CPU: it seemed to hang."""
    monkeypatch.setattr(styling, "ADAIN_STEPS", 10)
    recipe = dataclasses.replace(RECIPE, mixer=StyleMix())
    train(recipe, tmp_path / "run", sets=sets)
    said = capsys.readouterr()
    assert "training a style network for StyleMix first, 10 steps" in said.out
    assert "style network: step 10 of 10" in said.err


@pytest.mark.parametrize("name", ["gpu", "cuda:x"])
def test_a_device_that_there_is_not_is_named(name, sets, tmp_path):
    with pytest.raises(ValueError, match=f"there is no device '{name}'; use cpu, cuda"):
        evaluate(torch.nn.Flatten(), sets.test, device=name)


def test_what_is_not_a_run_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        evaluate(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"name": "x"}))
    with pytest.raises(
        ValueError, match=r"run\.json is damaged \(.*\): restore it from a copy, or"
    ):
        evaluate(tmp_path)
    for record in ([], RECIPE.to_json() | {"data": []}, RECIPE.to_json() | {"mixer": None}):
        (tmp_path / "run.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=r"run\.json is damaged"):
            evaluate(tmp_path)
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        evaluate(tmp_path)


def test_tensorboard_files_are_written_when_asked_for(tmp_path, sets):
    pytest.importorskip("tensorboard")
    one = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, epochs=1))
    train(one, tmp_path / "run", sets=sets, loggers=["tensorboard"], quiet=True)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"train/mixed_loss" in events.read_bytes()
