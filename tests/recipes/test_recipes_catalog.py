"""Every recipe builds and trains, and stands beside the figure the paper prints."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from alignmixup.contracts import ImageSet
from alignmixup.datasets import find
from alignmixup.experiments import styling
from alignmixup.experiments.batches import load_split
from alignmixup.experiments.bench import bench, check_rows, write_rows
from alignmixup.experiments.run import Sets, train
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models.zoo import NetSpec, build
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.schema import Recipe, changed, on_data
from alignmixup.registry import RECIPES, register_model, register_recipe
from alignmixup.report.paper import cell_beside
from torchvision_schemas import define_torchvision_schemas

NAMES = recipe_names()
LARGEST = 64  # pixels: what is for 224 trains on fewer here


def one_of_each(names):
    """Names such that every network for every size of image and every method is among them.

    Those that only combine them anew are slow. A ``-fast`` twin is the same two steps but for its
    schedule, and most rows of CIFAR-100 are those of CIFAR-10 but for the number of classes.
    """
    seen, chosen = [], []
    for name in names:
        recipe = find_recipe(name).shrunk()
        net = dataclasses.replace(recipe.net, zero_norms=False)
        size = find(recipe.data.name).image_size
        parts = [(size, net), type(recipe.mixer)]
        together = (size, net, recipe.mixer)
        is_new = any(part not in seen for part in parts)
        # Large; their methods are tested on small transformers.
        is_new &= "deit" not in net.name and "levit" not in net.name
        if is_new or together not in seen:
            chosen.append(pytest.param(name, marks=() if is_new else pytest.mark.slow))
            seen += [*parts, together]
    return chosen


def made_up(data, count=8):
    entry = find(data)
    side, classes = entry.image_size, entry.num_classes
    side, classes = (
        min(side, LARGEST),
        min(classes, count),
    )  # an image of each: Auto-Gamma needs one
    rng = torch.Generator().manual_seed(1)
    return ImageSet(
        data,
        "train",
        torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=rng),
        torch.arange(count) % classes,
        tuple(str(i) for i in range(classes)),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
    )


@pytest.mark.parametrize("name", one_of_each(NAMES))
def test_every_recipe_takes_two_steps(name, tmp_path, monkeypatch):
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    recipe = find_recipe(name).shrunk()
    if recipe.net.name.startswith("timm:"):
        define_torchvision_schemas()
    images = made_up(recipe.data.name)
    summary = train(recipe, tmp_path / "run", sets=Sets(images, images), quiet=True).summary
    assert summary.is_complete
    assert 0 <= summary.last <= 100
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    epoch = json.loads(lines[-1])
    assert sum(epoch["cases"].values()) == 2
    assert epoch["loss"] > 0


def test_every_recipe_comes_back_from_its_record():
    for name in NAMES:
        recipe = find_recipe(name)
        record = json.loads(json.dumps(recipe.to_json()))
        assert Recipe.from_json(record) == recipe, name


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cifar10-r18-baseline", 5.19),
        ("cifar10-r18-alignmixup-fast", 2.95),
        ("cifar10-wrn16-8-cutmix", 3.54),
        ("cifar100-r18-alignmixup", 18.29),
        ("cifar100-wrn16-8-manifold", 19.23),
        ("tiny-r18-input", 43.48),
        ("tiny-r18-alignmixup", 33.13),
        ("cifar100-r18-alignmixup-ae-fast", 17.82),
        ("cifar100-r18-alignmixup-xA", 18.29),
        ("cifar100-r18-alignmixup-xA-unaligned", 19.66),
        ("cifar100-r18-alignmixup-ae-xAe-fast", 17.82),
        ("cifar100-r18-alignmixup-ae-xe", 18.08),
        ("cifar100-r18-alignmixup-ae-xE", 18.46),
        ("cifar100-r18-alignmixup-ae-xA8e-unaligned", 19.51),
        ("cifar100-r18-alignmixup-vae-xAmusigma", 18.11),
        ("cifar100-r18-alignmixup-ae-x", None),
        ("cifar100-r18-alignmixup-iterations10", 19.04),
        ("cifar100-r18-manifold-300", 21.64),
        ("cifar100-r18-alignmixup-300", 21.38),
        ("cifar100-r18-input-300", 20.21),
        ("cifar100-r18-cutmix-300", 19.37),
        ("cifar100-r18-baseline-300", None),
        ("cifar100-r18-alignmixup-ae-300", None),
        ("imagenet-r50-alignmixup-100", 22.0),
        ("imagenet-r50-comixup-100", 22.39),
        ("imagenet-levit-128s-cutmix", 31.3),
        ("imagenet-r50-alignmixup", 20.68),
        ("imagenet-r50-alignmixup-ae", 18.83),
        ("imagenet-r50-comixup", None),
        ("imagenet-r50-alignmixup-unaligned", None),
        ("cifar10-r18-cutout", None),
        ("cifar10-r18-flatten-alignmixup", None),
        ("cifar10-r18-alignmixup-unaligned", None),
    ],
)
def test_the_published_figure_is_that_of_the_table(name, error):
    recipe = find_recipe(name)
    assert recipe.name == recipe.key.name == name
    cell = cell_beside(recipe.key)
    assert (None if cell is None else cell.top1_error) == error


def test_every_key_names_the_data_of_its_recipe():
    for name in NAMES:
        recipe = find_recipe(name)
        assert (recipe.key.data, recipe.base) == (recipe.data.name, None)


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is gone afterwards."""
    len(RECIPES)  # all built-in ones are there
    monkeypatch.setattr(RECIPES, "_entries", dict(RECIPES._entries))


def test_a_function_of_one_recipe_or_of_several_is_registered(registry):
    base = find_recipe("cifar10-r18-cutmix")
    one, two, three = (
        dataclasses.replace(base, key=base.key.labeled("mine", label)) for label in "abc"
    )

    @register_recipe
    def single():
        return one

    @register_recipe
    def family():
        yield from (two, three)

    assert recipe_names("-mine-") == [recipe.name for recipe in (one, two, three)]
    assert find_recipe("cifar10-r18-cutmix-mine-b") is two
    assert single() is one

    @register_recipe
    def again():
        return two

    with pytest.raises(ValueError, match="two recipes are named cifar10-r18-cutmix-mine-b; give"):
        find_recipe("cifar10-r18-cutmix")


def test_what_has_no_name_of_a_function_is_no_recipe(registry):
    """A ``functools.partial`` was an ``AttributeError``."""
    for wrong in (find_recipe("cifar10-r18-cutmix"), functools.partial(find_recipe, "a")):
        with pytest.raises(ValueError, match=r"^write @register_recipe without brackets above a f"):
            register_recipe(wrong)


def test_recipes_are_made_once(registry):
    calls = []

    @register_recipe
    def counted():
        calls.append(1)
        return []

    for name in NAMES[:20]:
        assert find_recipe(name) is find_recipe(name)
        recipe_names(name)
    assert calls == [1]


def test_schedules_are_the_papers_and_the_short_one():
    paper, fast = find_recipe("cifar100-r18-input").train, find_recipe("cifar100-r18-input-fast")
    assert (paper.epochs, paper.batch_size, paper.lr) == (2000, 128, 0.1)
    assert (paper.milestones, paper.decay, paper.weight_decay) == ((500, 1000, 1500), 0.1, 1e-4)
    assert (fast.train.epochs, fast.train.schedule, fast.train.weight_decay) == (
        300,
        "cosine",
        5e-4,
    )
    short = find_recipe("cifar100-r18-input-300").train
    assert short == dataclasses.replace(paper, epochs=300, milestones=(75, 150, 225))
    tiny = find_recipe("tiny-r18-alignmixup").train
    assert (tiny.epochs, tiny.milestones, tiny.batch_size) == (1200, (600, 900), 256)


def test_alignmixup_recipes_have_the_papers_settings():
    mixer = find_recipe("cifar100-wrn16-8-alignmixup").mixer
    assert (mixer.layer, mixer.alpha, mixer.eps, mixer.num_iters) == ("norm", 2.0, 0.1, 100)
    assert dict(mixer.cases) == pytest.approx(dict.fromkeys(("input", "feat", "feat'"), 1 / 3))
    released = find_recipe("cifar10-r18-alignmixup-released").mixer
    assert dict(released.cases) == {"input": 0.5, "feat": 0.25, "feat'": 0.25}


def test_names_are_found_by_part_and_pattern_and_a_wrong_one_has_neighbors():
    assert "cifar10-r18-alignmixup" in recipe_names("r18-align")
    assert recipe_names("tiny-*-fast") == [n for n in NAMES if n.startswith("tiny") and "fast" in n]
    with pytest.raises(ValueError, match=r"'cifar10-r18-alinmixup'.*cifar10-r18-alignmixup"):
        find_recipe("cifar10-r18-alinmixup")


def test_settings_are_changed_by_name_and_unknown_ones_named():
    recipe = changed(find_recipe("cifar10-r18-alignmixup"), {"train.epochs": 7, "mixer.alpha": 0.5})
    assert (recipe.train.epochs, recipe.mixer.alpha) == (7, 0.5)
    with pytest.raises(ValueError, match=r"'train\.epoch'.*epochs"):
        changed(recipe, {"train.epoch": 7})
    with pytest.raises(ValueError, match="'epochs'"):
        changed(recipe, {"epochs": 7})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.epochs", "many", r"train\.epochs must be int, got 'many'"),
        ("train.epochs", 1.5, r"train\.epochs must be int, got 1\.5"),
        ("train.batch_size", True, r"train\.batch_size must be int, got True"),
        ("train.compile", 1, r"train\.compile must be True or False or 'auto', got 1"),
        ("train.clip_norm", "1", r"train\.clip_norm must be float or None, got '1'"),
        ("train.milestones", (1, 2.5), r"train\.milestones must be tuple\[int, \.\.\.\], got"),
        ("data.area", (0.5,), r"data\.area must be tuple\[float, float\], got \(0\.5,\)"),
        ("mixer.weights", {"feat": "x"}, r"mixer\.weights must be dict\[str, float\], got"),
        ("mixer.layer", 4, r"mixer\.layer must be str, got 4"),
        ("mixer.loss", "mse", r"mixer\.loss must be 'ce' or 'bce' or 'sigmoid_bce', got 'mse'"),
    ],
)
def test_a_setting_of_another_type_is_named(path, value, message):
    recipe = find_recipe("cifar10-r18-alignmixup")
    with pytest.raises(ValueError, match=message):
        changed(recipe, {path: value})
    part, name = path.split(".")
    record = json.loads(json.dumps(recipe.to_json()))
    record[part][name] = value
    with pytest.raises(ValueError, match=message.removeprefix(rf"{part}\.")):
        Recipe.from_json(record)


def test_whole_numbers_and_none_are_taken_where_they_fit():
    recipe = changed(
        find_recipe("cifar10-r18-alignmixup"), {"train.lr": 1, "train.clip_norm": None}
    )
    assert (recipe.train.lr, recipe.train.clip_norm) == (1, None)


def test_a_record_with_an_unknown_setting_is_refused():
    record = find_recipe("cifar10-r18-alignmixup").to_json()
    record["mixer"]["temperature"] = 1
    with pytest.raises(ValueError, match=r"AlignMixup has no settings \['temperature'\]"):
        Recipe.from_json(record)
    record["mixer"] = {"kind": "SuperMix"}
    with pytest.raises(ValueError, match="'SuperMix'"):
        Recipe.from_json(record)


@pytest.mark.parametrize("setting", ["train.clip_norm", "mixer.tol"])
def test_a_setting_that_no_result_could_name_is_refused(setting):
    """JSON has no infinity: it would be found out when the run is over."""
    with pytest.raises(ValueError, match=f"{setting} must be finite, got inf"):
        changed(find_recipe("cifar10-r18-alignmixup"), {setting: float("inf")})


def test_bench_times_every_case(tmp_path):
    small = {
        "train.device": "cpu",
        "train.precision": "float32",
        "train.compile": False,
        "train.batch_size": 4,
        "net.width": 4,
    }
    said = []
    names = ["cifar10-r18-alignmixup"]
    measured = list(bench(names, changes=small, repeats=3, say=said.append))
    (line,) = said
    assert re.fullmatch(r"9 steps of [\d.e+]+ ms, about \d+ s", line)
    assert [c.case for c in measured[0].cases] == ["input", "feat", "feat'"]
    for case in measured[0].cases:
        assert 0 < case.p20 <= case.p50 <= case.p80
    mean = sum(c.p50 for c in measured[0].cases) / 3
    assert measured[0].mean() == pytest.approx(mean)
    assert measured[0].step_path == "plain"
    (styled,) = bench(["cifar10-r18-stylecutmix"], changes=small, repeats=2)
    assert styled.mean() > 0
    write_rows(tmp_path / "rows.csv", measured)
    write_rows(tmp_path / "rows.csv", measured)
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 + 3
    assert rows[0].startswith("recipe,case,probability,p20,p50,p80,num_parameters")
    (tmp_path / "rows.csv").write_text("recipe,ms\na,1\n")
    with pytest.raises(ValueError, match=r"rows\.csv has other columns \(recipe, ms\)"):
        write_rows(tmp_path / "rows.csv", measured)
    with pytest.raises(FileNotFoundError, match=r"the folder of .* does not exist"):
        write_rows(tmp_path / "missing" / "rows.csv", measured)


def test_the_benchmarks_kept_here_can_be_appended_to():
    check_rows(Path(__file__).parents[2] / "benchmarks" / "h200_steps.csv")


def test_style_mixing_trains_its_own_small_network_once(tmp_path, monkeypatch):
    monkeypatch.setattr(styling, "ADAIN_STEPS", 2)
    recipe = find_recipe("cifar10-r18-stylecutmix").shrunk()
    images = made_up("cifar10")
    written = []
    for _ in range(2):
        train(recipe, tmp_path / "run", sets=Sets(images, images), quiet=True)
        written.append((tmp_path / "run" / "adain.safetensors").stat().st_mtime_ns)
    assert written[0] == written[1]
    events = [json.loads(x) for x in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    (note,) = [e for e in events if e["event"] == "style_weights"]
    assert note["kind"] == "small"
    assert len(note["sha256"]) == 64


def test_a_record_from_before_blocks_were_a_setting_has_the_standard_one():
    for name, block in (("cifar10-r18-alignmixup", "standard"), ("imagenet-r50-input", "released")):
        record = find_recipe(name).to_json()
        assert Recipe.from_json(record).net.block == "released"
        del record["net"]["block"]
        assert Recipe.from_json(record).net.block == block


def test_shrunk_narrows_only_what_has_a_width():
    recipe = find_recipe("cifar10-r18-cutmix-fast")
    assert recipe.shrunk().net.width == 4
    register_model("fixed", layer="0")(lambda num_classes, mean, std: nn.Identity())
    fixed = dataclasses.replace(recipe, net=NetSpec("fixed")).shrunk()
    build(fixed.net, 10, (0.5,) * 3, (0.5,) * 3, 32)  # or an error: width does not apply


def test_shrunk_keeps_the_method():
    recipe = find_recipe("cifar10-r18-alignmixup")
    assert recipe.shrunk().mixer == recipe.mixer
    assert isinstance(recipe.mixer, AlignMixup)
    assert dataclasses.replace(recipe, net=recipe.shrunk().net) != recipe


def test_what_reads_a_whole_map_of_raw_features_has_its_gradients_clipped():
    recipes = {name: find_recipe(name) for name in recipe_names()}
    clipped = {name for name, recipe in recipes.items() if recipe.train.clip_norm == 1.0}
    nets = {name: recipe.net for name, recipe in recipes.items()}
    reads = {n for n, net in nets.items() if net.head == "flatten" or net.autoencoder != "none"}
    assert clipped == reads
    assert "cifar100-r18-alignmixup-ae-xAe-fast" in reads
    assert "cifar10-r18-flatten-baseline" in reads


def test_settings_may_be_changed_together_and_epochs_by_themselves():
    recipe = find_recipe("cifar10-r18-baseline-fast")
    short = changed(recipe, {"train.epochs": 1, "train.warmup_epochs": 0.0, "net.width": 4})
    assert (short.train.epochs, short.train.warmup_epochs, short.net.width) == (1, 0.0, 4)
    assert changed(recipe, {"train.epochs": 1}).train.fitted().warmup_epochs < 1


def test_a_folder_is_named_alike_from_every_directory(tmp_path, monkeypatch):
    recipe = find_recipe("cifar10-r18-baseline-fast")
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    near, whole = on_data(recipe, "folder:b@32"), on_data(recipe, f"folder:{tmp_path}/a/b@32")
    assert near == whole
    assert near.data.name == f"folder:{tmp_path}/a/b@32"
    assert near.name == "folder_b_32-r18-baseline-fast"
    monkeypatch.chdir(tmp_path)
    assert on_data(recipe, "folder:a/b@32") == near
    assert Recipe.from_json(json.loads(json.dumps(near.to_json()))) == near


def test_a_folder_of_another_size_gives_a_streamed_recipe_that_size():
    full = find_recipe("imagenet-r50-baseline")
    small = on_data(full, "folder:pictures@96").data
    assert (full.data.image_size, small.image_size) == (224, 96)
    views = {name: getattr(full.data, name) for name in ("resize", "eval_resize")}
    for name, side in views.items():
        assert getattr(small, name) == (None if side is None else round(side * 96 / 224))
    assert on_data(full, "folder:pictures").data.image_size == 224


def test_settings_that_would_do_nothing_are_refused():
    recipe = find_recipe("cifar10-r18-baseline")
    with pytest.raises(ValueError, match=r"data\.name cannot be overridden; use --dataset"):
        changed(recipe, {"data.name": "shapes"})
    with pytest.raises(ValueError, match=r"unknown setting 'name\.x'"):
        changed(recipe, {"name.x": 1})
    jittered = on_data(changed(recipe, {"data.jitter": 0.4}), "shapes")
    with pytest.raises(ValueError, match=r"data\.jitter=0\.4 is for streamed files"):
        load_split(jittered.data, "test", None)


def test_milestones_beyond_the_end_are_told(tmp_path, capsys):
    recipe = find_recipe("cifar10-r18-baseline").shrunk()
    late = dataclasses.replace(recipe.train, schedule="step", milestones=(1, 500))
    images = made_up("cifar10")
    train(dataclasses.replace(recipe, train=late), tmp_path, sets=Sets(images, images))
    assert "the rate falls, [1, 500] lie beyond the last epoch, 1" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["manifold", "puzzlemix", "comixup"])
@pytest.mark.parametrize("place", ["cifar10-r18", "cifar100-wrn16-8", "tiny-r18"])
def test_methods_published_with_bce_have_a_recipe_with_it(place, method):
    """Beside the table's own, which differs in nothing else."""
    for suffix in ("", "-fast"):
        table, bce = (find_recipe(f"{place}-{method}{loss}{suffix}") for loss in ("", "-bce"))
        assert (table.mixer.loss, bce.mixer.loss) == ("ce", "bce")
        same = dataclasses.replace(bce.mixer, loss="ce")
        assert dataclasses.replace(bce, key=table.key, mixer=same) == table
        assert cell_beside(bce.key) == cell_beside(table.key)


@pytest.mark.parametrize(("data", "delta"), [("cifar10", 1.6), ("cifar100", 3.0), ("tiny", 3.0)])
def test_stylecutmix_has_the_authors_automatic_gamma(data, delta):
    mixer = find_recipe(f"{data}-r18-stylecutmix").mixer
    assert (mixer.gamma, mixer.delta) == ("auto", delta)
