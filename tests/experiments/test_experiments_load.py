"""A run opened from its folder alone: predictions, exports, and a user's own module."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import alignmixup as am
from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.experiments.batches import eval_batches, load_split, train_batches
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.report.reading import read_results
from alignmixup.training import TrainSettings
from kept_registries import kept_registries
from picture_folder import make_pictures

CPU = torch.device("cpu")
RECIPE = Recipe(
    key=RecipeKey("shapes", "r18", "input"),
    data=DataSpec("shapes"),
    net=NetSpec("preact_resnet18", width=4),
    mixer=InputMixup(),
    train=TrainSettings(
        epochs=1, batch_size=16, lr=0.02, schedule="cosine", milestones=(), device="cpu"
    ),
)


@pytest.fixture(scope="module")
def sets():
    return am.Sets(shapes("train", 48), shapes("test", 40))


@pytest.fixture(scope="module")
def run(sets, tmp_path_factory):
    return am.train(RECIPE, tmp_path_factory.mktemp("load") / "run", sets=sets, quiet=True)


def test_train_returns_the_run_that_load_run_opens(run, sets):
    opened = am.load_run(str(run.folder), device="cpu")
    assert (opened.recipe, opened.epoch, opened.folder) == (RECIPE, 1, run.folder)
    assert opened.class_names == run.class_names == sets.test.class_names
    assert opened.summary == run.summary
    assert not opened.model.training
    x = sets.test.images.float() / 255
    assert torch.equal(opened.model(x), run.model(x))


def test_images_of_a_run_load_on_any_default_device():
    """It was an error of the order of a limited set, in ``evaluate(run)``."""
    spec = DataSpec("shapes", limit=20)
    with torch.device("meta"):
        images = load_split(spec, "test", None)
    assert torch.equal(images.labels, load_split(spec, "test", None).labels)


def test_the_default_device_of_torch_is_not_used(run, sets, tmp_path):
    """As after torch.set_default_device("cuda")."""
    x = sets.test.images[:3]
    with torch.device("meta"):
        again = am.train(RECIPE, tmp_path / "run", sets=sets, quiet=True)
        opened = am.load_run(tmp_path / "run", device="cpu")
        assert torch.equal(opened.predict(x).probabilities, again.predict(x).probabilities)
        opened.with_clean_statistics(sets.train).export(tmp_path / "net.safetensors")
        assert torch.get_default_device() == torch.device("meta")
    assert torch.equal(again.predict(x).probabilities, run.predict(x).probabilities)


def test_a_prediction_is_the_softmax_of_the_network_for_every_kind_of_source(run, sets, tmp_path):
    pixels = sets.test.images[:5]
    with torch.inference_mode():
        expected = run.model(pixels.float() / 255).softmax(1)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    for source in (pixels, pixels.float() / 255, pictures, paths, [str(path) for path in paths]):
        done = run.predict(source, batch_size=2)
        torch.testing.assert_close(done.probabilities, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(done.labels, expected.argmax(1))
        assert done.class_names == tuple(run.class_names[i] for i in done.labels)
    for one in (pictures[0], paths[0], str(paths[0])):
        torch.testing.assert_close(run.predict(one).probabilities, expected[:1])
    large = nn.functional.interpolate(pixels.float(), scale_factor=2, mode="nearest")
    both = run.predict(large.byte()), run.predict(large / 255)
    assert torch.equal(both[0].probabilities, both[1].probabilities)


def test_a_prediction_depends_neither_on_the_mode_nor_on_the_float_type(run, sets):
    pixels = sets.test.images[:5]
    opened = am.load_run(run.folder, device="cpu")
    expected = run.predict(pixels).probabilities
    opened.model.train()
    before = {name: value.clone() for name, value in opened.model.state_dict().items()}
    found = [opened.predict(source) for source in (pixels, pixels.double() / 255)]
    assert all(torch.equal(each.probabilities, expected) for each in found)
    assert opened.model.training
    for name, value in opened.model.state_dict().items():  # batch statistics, too
        assert torch.equal(value, before[name]), name
    half = opened.model.bfloat16().eval()
    with torch.inference_mode():
        rough = half(pixels.bfloat16() / 255).float().softmax(1)
    torch.testing.assert_close(opened.predict(pixels).probabilities, rough, atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stream": True},
        {"stream": True, "eval_resize": 20},
        {"stream": True, "eval_resize": 18, "squash": True},
    ],
)
def test_files_are_prepared_as_the_recipe_evaluates_them(run, tmp_path, how):
    for split in ("train", "val"):
        (tmp_path / split / "noise").mkdir(parents=True)
        for number, shape in enumerate([(40, 28), (16, 16), (17, 31)]):
            noise = torch.randint(256, (*shape, 3), dtype=torch.uint8).numpy()
            Image.fromarray(noise).save(tmp_path / split / "noise" / f"{number}.png")
    spec = DataSpec(f"folder:{tmp_path}@16", **how)
    images = load_split(spec, "test", None)
    ((x, _),) = eval_batches(spec, RECIPE.train, images, torch.device("cpu"))
    files = sorted((tmp_path / "val").rglob("*.png"))
    recipe = dataclasses.replace(RECIPE, data=spec)
    data = dataclasses.replace(run.data, image_size=16)
    opened = dataclasses.replace(run, recipe=recipe, data=data, model=Shown())
    with torch.no_grad():
        expected = Shown()(x).softmax(1)
    assert torch.equal(opened.predict(files).probabilities, expected)


class Shown(nn.Module):
    """Gives some of the pixels it is shown as logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x.flatten(1)[:, :768:77]


def test_an_opened_image_of_16_bits_is_that_of_its_file(run, tmp_path):
    """It was clipped to white at 255 of 65,535."""
    path = tmp_path / "deep.png"
    Image.fromarray((257 * np.arange(256)).astype(np.uint16).reshape(16, 16)).save(path)
    found = [run.predict(source).probabilities for source in (path, Image.open(path))]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (".", r"^\. is a folder, not an image file: name the files in it"),
        (Image.new("F", (8, 8)), r"^a PIL image cannot be classified \(it has floating-point"),
        (torch.zeros(3, 32, 32), r"tensor \[b, 3, h, w\], got \[3, 32, 32\]"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "bytes, or floats in"),
        (torch.full((1, 3, 32, 32), 255.0), r"must lie in \[0, 1\]"),
        (torch.full((1, 3, 40, 40), 255.0), r"must lie in \[0, 1\]"),
        ([], "no image to classify"),
        ([3], "a PIL image or a path, got int"),
        ([torch.zeros(3, 32, 32)], r"got Tensor; pass tensors as one, \[b, 3, h, w\]"),
    ],
)
def test_what_is_no_image_is_named(run, images, named):
    with pytest.raises(ValueError, match=named):
        run.predict(images)


@pytest.mark.parametrize("kind", [str, Path])
def test_an_address_in_place_of_a_file_is_named(run, kind):
    with pytest.raises(FileNotFoundError, match=r"^https://a.org/b.png is an address.*load"):
        run.predict(kind("https://a.org/b.png"))


def test_predict_on_the_command_line(run, sets, tmp_path, capsys):
    make_pictures(tmp_path / "pictures")
    (one, *_) = sorted((tmp_path / "pictures").rglob("*.png"))
    words = ["predict", str(run.folder), str(one), str(tmp_path / "pictures"), "--device", "cpu"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert main([*words, "--json", "--top", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(table.splitlines()) == 1 + len(lines)
    assert lines[0]["image"] == str(one)
    expected = run.predict(one)
    assert lines[0]["class"] == expected.class_names[0]
    assert lines[0]["label"] == int(expected.labels[0])
    assert [*lines[0]["top"].values()] == pytest.approx(
        expected.probabilities[0].topk(2).values.tolist()
    )


BUILD = """
import importlib, json, sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from alignmixup.models import NetSpec, build

torch.set_num_threads(1)
weights = Path(sys.argv[1])
facts = json.loads(weights.with_suffix(".json").read_text())
net = build(NetSpec(**facts["spec"]), **facts["arguments"])
assert (type(net).__module__, type(net).__name__) == (facts["module"], facts["class"])
net.load_state_dict(load_file(weights))
with torch.no_grad():
    torch.save(net.eval()(torch.load(sys.argv[2])), sys.argv[3])
assert not any(name.startswith("alignmixup.experiments") for name in sys.modules)
assert "huggingface_hub" not in sys.modules
"""


def test_plain_weights_are_built_elsewhere_from_their_json(run, sets, tmp_path):
    weights = tmp_path / "out" / "net.safetensors"
    assert run.export(weights) == [weights, weights.with_suffix(".json")]
    facts = json.loads(weights.with_suffix(".json").read_text())
    assert facts["class_names"] == list(run.class_names)
    assert (facts["image_size"], facts["epoch"]) == (32, 1)
    state = run.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in load_file(weights).items())
    x = sets.test.images[:4].float() / 255
    torch.save(x, tmp_path / "x.pt")
    there = [str(weights), str(tmp_path / "x.pt"), str(tmp_path / "y.pt")]
    done = subprocess.run([sys.executable, "-c", BUILD, *there], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y.pt"), run.model(x))


# torch's own, where torch 2.12 reads the file.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_program_of_torch_export_takes_any_batch(run, sets, tmp_path, capsys):
    path = tmp_path / "net.pt2"
    assert main(["export", str(run.folder), str(path), "--format", "torch-export"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    program = torch.export.load(path).module()
    x = sets.test.images.float() / 255
    for count in (1, 7):
        with torch.no_grad():
            expected = run.model(x[:count])
            torch.testing.assert_close(program(x[:count]), expected, atol=1e-6, rtol=1e-5)


def test_a_folder_for_the_hub_is_read_back(run, sets, tmp_path):
    pytest.importorskip("huggingface_hub")
    from alignmixup.experiments.hub import HubModel

    written = run.export(tmp_path / "hub", format="hub")
    assert {"config.json", "model.safetensors"} <= {path.name for path in written}
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "More Information Needed" not in card  # the card of the library, which knows nothing
    for fact in ("preact_resnet18, 10 classes", "32 x 32 pixels", ", ".join(run.class_names)):
        assert fact in card
    again = HubModel.from_pretrained(str(tmp_path / "hub"))
    x = sets.test.images[:4].float() / 255
    assert again.class_names == run.class_names
    assert torch.equal(again.eval()(x), run.model(x))


def test_formats_and_names_of_files_are_checked(run, tmp_path):
    with pytest.raises(ValueError, match="unknown format 'onnx'; choose from safetensors"):
        run.export(tmp_path / "net.onnx", format="onnx")
    with pytest.raises(ValueError, match=r"must end in \.safetensors, got .*net\.pt"):
        run.export(tmp_path / "net.pt")


class Small(nn.Module):
    """A user's own network."""

    def __init__(self, num_classes=10, width=8):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=4)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)  # and returns nothing, as modules of users do


def test_a_users_module_trains_resumes_and_is_scored_under_its_own_name(sets, tmp_path):
    recipe = dataclasses.replace(RECIPE, mixer=ManifoldMixup(layers=("input", "conv")))
    torch.manual_seed(1)
    model = Small()
    before = model.head.weight.detach().clone()
    run = am.train(recipe, tmp_path, model=model, sets=sets, quiet=True)
    assert run.model is model
    assert not torch.equal(model.head.weight, before)
    assert {r.key.name for r in read_results([tmp_path])} == {"shapes-Small-input"}
    with pytest.raises(ValueError, match="weights of a module of yours, Small: pass one with"):
        am.load_run(tmp_path)
    again = am.train(recipe, tmp_path, model=Small(), sets=sets, quiet=True)  # resumed: complete
    assert torch.equal(again.model.head.weight, model.head.weight)
    opened = am.load_run(tmp_path, model=Small(), device="cpu")
    top1 = am.evaluate(opened, sets.test).value("accuracy", "top1")
    assert top1 == pytest.approx(run.summary.last)
    done = am.evaluate(tmp_path, sets.test, model=Small(), device="cpu")
    assert done.value("accuracy", "top1") == top1
    with pytest.raises(ValueError, match="holds the weights of another network"):
        am.load_run(tmp_path, model=Small(width=4))
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, got <class"):
        am.load_run(tmp_path, model=Small)
    with pytest.raises(ValueError, match=r"net\.name: module:Small before, module:Other now"):
        am.train(recipe, tmp_path, model=type("Other", (Small,), {})(), sets=sets, quiet=True)
    facts = json.loads(opened.export(tmp_path / "w.safetensors")[1].read_text())
    assert facts["class"] == "Small"
    assert "spec" not in facts
    with pytest.raises(ValueError, match="needs a network built by name; Small can inherit"):
        opened.export(tmp_path / "hub", format="hub")


def test_a_module_that_gives_no_logits_is_refused(sets, tmp_path):
    for model, named in (
        (Small(7), r"logits \[b, 10\].*got \[2, 7\].*: change its last layer, .*as_logits"),
        (nn.Flatten(), "no param"),
        (Small().requires_grad_(False), r"requires a gradient.* model\.requires_grad_\(\)"),
        (Small().double(), r"weights of torch\.float64.* model\.float\(\)"),
    ):
        with pytest.raises(ValueError, match=named):
            am.train(RECIPE, tmp_path / "run", model=model, sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_registered_network_that_gives_no_logit_for_each_class_is_refused(sets, tmp_path):
    with kept_registries():
        am.register_model("seven", layer="head")(lambda num_classes, mean, std: Small(7))
        recipe = dataclasses.replace(RECIPE, net=NetSpec("seven"))
        with pytest.raises(ValueError, match=r"seven must return logits \[b, 10\].*got \[2, 7\]"):
            am.train(recipe, tmp_path / "run", sets=sets, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_network_that_the_images_are_too_small_for_is_refused(tmp_path):
    train, test = (
        dataclasses.replace(shapes(split, 20), images=torch.zeros(20, 3, 8, 8).byte(), boxes=None)
        for split in ("train", "test")
    )
    tiny = am.Sets(train, test)
    pools = nn.Sequential(nn.MaxPool2d(16), nn.Flatten(), nn.Linear(3, 10))
    for given, name in (({"changes": {"net.name": "vgg_gap"}}, "vgg_gap"), ({"model": pools}, "")):
        with pytest.raises(ValueError, match=f"{name}.* fails on images of 8 x 8 .*too small"):
            am.train(RECIPE, tmp_path / "run", sets=tiny, quiet=True, **given)
    assert not (tmp_path / "run").exists()


def few_classes(images, num_classes):
    kept = images.labels < num_classes
    return dataclasses.replace(
        images,
        name="few",
        images=images.images[kept],
        labels=images.labels[kept],
        class_names=images.class_names[:num_classes],
        boxes=None,
    )


def test_a_run_starts_from_the_weights_of_another(run, tmp_path):
    """On other classes the head alone is drawn anew; the run and its results say so."""
    few = am.Sets(few_classes(shapes("train", 80), 3), few_classes(shapes("test", 40), 3))
    still = {"train.lr": 1e-12, "train.momentum": 0.0, "train.weight_decay": 0.0}
    fresh = am.train(RECIPE, tmp_path / "fresh", sets=few, changes=still, quiet=True)
    tuned = am.train(
        RECIPE, tmp_path / "tuned", sets=few, changes=still, init_from=run.folder, quiet=True
    )
    weights = run.model.state_dict()
    for name, value in tuned.model.state_dict().items():
        if name.startswith("head."):
            torch.testing.assert_close(value, fresh.model.state_dict()[name])
        elif "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(value, weights[name])
    record = json.loads((tmp_path / "tuned" / "run.json").read_text())["init_from"]
    assert record["run"] == str(run.folder.resolve())
    assert (record["recipe"], record["epoch"]) == ("shapes-r18-input", 1)
    assert record["redrawn"] == ["head.linear.bias", "head.linear.weight"]
    results = read_results([tmp_path / "tuned"])
    assert {r.trained["init_from"] for r in results} == {record["recipe"]}
    am.train(RECIPE, tmp_path / "tuned", sets=few, changes=still, quiet=True)  # resumes
    with pytest.raises(ValueError, match="init_from: None before, "):
        am.train(
            RECIPE, tmp_path / "fresh", sets=few, changes=still, init_from=run.folder, quiet=True
        )
    other = {**still, "net.width": 8}
    with pytest.raises(ValueError, match="are those of another network"):
        am.train(RECIPE, tmp_path / "a", sets=few, changes=other, init_from=run.folder, quiet=True)
    assert not (tmp_path / "a").exists()


def test_a_run_starts_from_the_average_that_another_was_scored_with(sets, tmp_path):
    averaged = am.train(RECIPE, tmp_path / "a", sets=sets, changes={"train.ema": 0.9}, quiet=True)
    still = {"train.lr": 1e-12, "train.momentum": 0.0, "train.weight_decay": 0.0}
    tuned = am.train(
        RECIPE, tmp_path / "b", sets=sets, changes=still, init_from=averaged.folder, quiet=True
    )
    for name, value in tuned.model.named_parameters():
        torch.testing.assert_close(value, averaged.model.get_parameter(name))


def test_a_head_that_does_not_fit_is_drawn_anew_with_its_bias(run, sets, tmp_path):
    flat = {"net.head": "flatten", "train.lr": 1e-12, "train.weight_decay": 0.0}
    fresh = am.train(RECIPE, tmp_path / "a", sets=sets, changes=flat, quiet=True)
    tuned = am.train(
        RECIPE, tmp_path / "b", sets=sets, changes=flat, init_from=run.folder, quiet=True
    )
    torch.testing.assert_close(tuned.model.head.linear.bias, fresh.model.head.linear.bias)
    record = json.loads((tmp_path / "b" / "run.json").read_text())["init_from"]
    assert record["redrawn"] == ["head.linear.bias", "head.linear.weight"]


def test_a_finished_run_is_extended(sets, tmp_path):
    recipe = dataclasses.replace(RECIPE, mixer=NoMix())

    def train(epochs, extend=True, folder="run"):
        changes = {"train.epochs": epochs}
        return am.train(
            recipe, tmp_path / folder, sets=sets, changes=changes, extend=extend, quiet=True
        )

    with pytest.raises(ValueError, match="holds no run to extend"):
        train(2)
    assert train(2, extend=False).epoch == 2
    longer = train(3)
    assert (longer.epoch, longer.summary.is_complete, longer.recipe.train.epochs) == (3, True, 3)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["extended"] == [2]
    results = [r for r in read_results([tmp_path / "run"]) if r.metric == "top1_last"]
    assert [(r.epoch, r.trained.get("extended")) for r in results] == [(2, None), (3, [2])]
    assert train(3).epoch == train(3, extend=False).epoch == 3  # nothing more to do
    with pytest.raises(ValueError, match="has 3 epochs and cannot be shortened to 2"):
        train(2)
    with pytest.raises(ValueError, match=r"train\.epochs: 3 before, 4 now.*--extend"):
        train(4, extend=False)
    assert train(4).epoch == 4
    assert json.loads((tmp_path / "run" / "run.json").read_text())["extended"] == [2, 3]
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines if '"event": "epoch"' in line]
    whole = train(4, extend=False, folder="whole")
    lines = (whole.folder / "ledger.jsonl").read_text().splitlines()
    at_once = [json.loads(line)["lr"] for line in lines if '"event": "epoch"' in line]
    assert rates[-1] == at_once[-1]  # the schedule is that of the new length
    assert rates[1] < at_once[1]


def test_clean_statistics_are_the_mean_over_batches_without_mixing(run, sets):
    clean = run.with_clean_statistics(sets.train, num_batches=2)
    batches = [x for x, _ in train_batches(RECIPE.data, RECIPE.train, sets.train, CPU).epoch(0)][:2]
    norm = next(m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d))
    name = next(name for name, module in run.model.named_modules() if module is norm)
    seen = []
    net = copy.deepcopy(run.model).train()
    net.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for x in batches:
        net(x)
    own = clean.model.get_submodule(name)
    torch.testing.assert_close(own.running_mean, sum(x.mean((0, 2, 3)) for x in seen) / 2)
    torch.testing.assert_close(own.running_var, sum(x.var((0, 2, 3)) for x in seen) / 2)
    assert not torch.equal(own.running_mean, norm.running_mean)
    assert own.momentum == norm.momentum
    assert not clean.model.training
    parameters = zip(clean.model.parameters(), run.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in parameters)


def test_norms_that_classifying_does_not_update_keep_their_statistics(run, sets):
    """They became those of an untrained network: mean 0, variance 1."""

    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen = nn.BatchNorm2d(3), Frozen(3)
            self.decoder = nn.BatchNorm2d(3)
            nn.init.constant_(self.frozen.running_mean, 0.25)
            nn.init.constant_(self.decoder.running_var, 4.0)

        def forward(self, x):
            return self.frozen(self.first(x)).mean((2, 3))

    opened = dataclasses.replace(run, model=Net().eval())
    clean, before = opened.with_clean_statistics(sets.train).model, opened.model
    for name in ("frozen", "decoder"):
        own, norm = before.get_submodule(name), clean.get_submodule(name)
        assert all(torch.equal(a, b) for a, b in zip(own.buffers(), norm.buffers(), strict=True))
    assert not torch.equal(clean.first.running_mean, before.first.running_mean)


def test_results_and_exports_say_that_statistics_are_clean(run, sets, tmp_path):
    clean = run.with_clean_statistics(sets.train)
    used = len(sets.train) // RECIPE.train.batch_size  # fewer than the 50 that were asked for
    for opened, expected, num_batches in ((run, None, None), (clean, "clean", used)):
        results = am.evaluate(opened, sets.test).results
        assert {result.settings.get("clean_batches") for result in results} == {num_batches}
        assert {result.trained.get("statistics") for result in results} == {expected}
        _, facts = opened.export(tmp_path / "net.safetensors")
        assert json.loads(facts.read_text()).get("statistics") == expected


def test_clean_statistics_need_batch_norm_and_images(run):
    with pytest.raises(ValueError, match=r"pass the training images"):
        run.with_clean_statistics()
    with pytest.raises(ValueError, match=r"num_batches must be at least 1, got 0"):
        run.with_clean_statistics(num_batches=0)
    plain = dataclasses.replace(run, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no batch norm"):
        plain.with_clean_statistics()


def test_commands_take_clean_statistics(tmp_path, capsys):
    words = "--dataset shapes --limit 64 --net.width 4 --train.epochs 1 --train.batch-size 16"
    folder, path = str(tmp_path / "run"), str(tmp_path / "net.safetensors")
    recipe = "cifar10-r18-input-fast"
    assert main(["train", recipe, "--out", folder, "--train.device", "cpu", *words.split()]) == 0
    assert main(["evaluate", folder, "--clean-statistics", "--device", "cpu"]) == 0
    results = [r for r in read_results([tmp_path / "run"]) if r.metric == "top1"]
    assert [result.trained["statistics"] for result in results] == ["clean"]
    assert main(["export", folder, path, "--clean-statistics"]) == 0
    saved, exported = am.load_run(folder, device="cpu"), load_file(path)
    for name, value in saved.with_clean_statistics().model.state_dict().items():
        torch.testing.assert_close(exported[name], value)
    means = {name: x for name, x in exported.items() if name.endswith("running_mean")}
    assert not any(torch.equal(saved.model.state_dict()[name], x) for name, x in means.items())
