"""A model, a data set and a task of a user: one file each, outside of the package.

The file is written by the test and imported as a plugin. It is then built, trained, resumed and
scored through the public functions, in this process and in another one.
"""

import os
from dataclasses import replace

import pytest
import torch

import alignmixup as am
from alignmixup import datasets, models
from alignmixup.contracts import RecipeKey
from alignmixup.experiments.scoring import evaluate
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models import NetSpec, default_tap
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.registry import DATASETS, MODELS, TASKS, import_plugin
from alignmixup.training import TrainSettings
from forked import Forked, finish
from kept_registries import kept_registries

MODEL = """
from torch import nn

import alignmixup as am
from alignmixup.models import Normalize


@am.register_model("outside_net", layer="features")
class OutsideNet(nn.Module):
    def __init__(self, num_classes, mean, std, *, width=8):
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.features = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.ReLU())
        self.norm = nn.LayerNorm(width)  # a layer that no built-in network has
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.features(self.normalize(x)).mean((2, 3))))
"""

DATA = """
import torch

import alignmixup as am


@am.register_dataset("outside_data", description="two tones", image_size=8, num_classes=2)
def load(root, split):
    labels = torch.arange(16 if split == "train" else 8) % 2
    images = (100 * labels).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()
    images[:, :, 2:4] += 50
    return am.ImageSet(
        "outside_data", split, images, labels, ("dark", "bright"), (0.5,) * 3, (0.25,) * 3
    )
"""

TASK = """
import alignmixup as am
from alignmixup.evaluation import collect_logits


@am.register_task("outside_task", units={"spread": "logits"})
def spread(model, batches, *, seed, normalized_by=None, scale: float = 1.0):
    logits, labels = collect_logits(model, batches, normalized_by=normalized_by)
    value = scale * float(logits.std())
    return [am.Result("outside_task", "spread", value, {"scale": scale, "seed": seed})]
"""

FILES = {"outside_model.py": MODEL, "outside_data.py": DATA, "outside_task.py": TASK}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with kept_registries():
        yield [import_plugin(str(folder / name)) for name in FILES]


def recipe():
    return Recipe(
        key=RecipeKey("outside_data", "outside_net", "alignmixup"),
        data=DataSpec("outside_data", pad=1),
        net=NetSpec("outside_net", width=4),
        mixer=AlignMixup(layer="features"),
        train=TrainSettings(epochs=2, batch_size=8, milestones=(), device="cpu"),
    )


def test_a_model_is_one_file(plugins):
    spec = NetSpec("outside_net", width=4)
    net, again = (models.build(spec, 2, (0.5,) * 3, (0.2,) * 3, 8, seed=3) for _ in range(2))
    assert net.head.weight.shape == (2, 4)
    assert default_tap(spec, net) == "features"
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    with pytest.raises(ValueError, match="last_stride=1 does not apply to outside_net"):
        models.build(replace(spec, last_stride=1), 2, (0.5,) * 3, (0.2,) * 3, 8)
    with pytest.raises(ValueError, match="autoencoder='vector' does not apply to outside_net"):
        models.build(replace(spec, autoencoder="vector"), 2, (0.5,) * 3, (0.2,) * 3, 8)
    with pytest.raises(ValueError, match="unknown model 'outsidenet'; did you mean 'outside_net'"):
        models.build(NetSpec("outsidenet"), 2, (0.5,) * 3, (0.2,) * 3, 8)


def test_a_data_set_is_one_file(plugins, capsys):
    from alignmixup.cli import main

    assert len(datasets.load("outside_data", "test")) == 8
    assert datasets.check("outside_data") == []
    assert main(["data", "list"]) == 0
    assert "two tones" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown data set 'outside_date'; did you mean 'outside"):
        datasets.load("outside_date", "test")


def test_a_task_is_one_file(plugins):
    net = models.build(NetSpec("outside_net"), 2, (0.5,) * 3, (0.2,) * 3, 8)
    images = datasets.load("outside_data", "test")

    def spread(**options):
        scores = am.evaluate(
            net, images, tasks=["outside_task"], options={"outside_task": options}, seed=5
        )
        assert {r.settings["seed"] for r in scores.results} == {5}
        return scores.value("outside_task", "spread")

    assert spread(scale=3.0) == pytest.approx(3 * spread())
    assert TASKS["outside_task"].unit("spread") == "logits"
    with pytest.raises(ValueError, match="no option 'scael'; did you mean 'scale'"):
        spread(scael=3.0)
    with pytest.raises(ValueError, match=r"outside_task\.scale must be float, got 'large'"):
        spread(scale="large")
    with pytest.raises(ValueError, match="unknown task 'outsidetask'; did you mean 'outside_task'"):
        am.evaluate(net, images, tasks=["outsidetask"])


def test_all_three_train_resume_and_are_scored(plugins, tmp_path):
    am.train(recipe(), tmp_path / "run", quiet=True)
    am.train(recipe(), tmp_path / "run", quiet=True)  # nothing is left to do
    scores = am.evaluate(tmp_path / "run", tasks=["accuracy", "outside_task"], device="cpu")
    assert scores.failed == scores.left_out == {}
    assert {r.task for r in scores.results} == {"accuracy", "outside_task"}
    # Another process knows them once it has imported the same files.
    program = (
        "import sys; from alignmixup.registry import import_plugin; import alignmixup as am\n"
        "for name in sys.argv[2:]: import_plugin(name)\n"
        "scores = am.evaluate(sys.argv[1], tasks=['outside_task'], device='cpu')\n"
        "print(scores.value('outside_task', 'spread'))"
    )
    (spread,) = finish([Forked(program, [str(tmp_path / "run"), *plugins], os.environ)])
    assert float(spread) == pytest.approx(scores.value("outside_task", "spread"))


def test_a_function_that_returns_nothing_is_named():
    with kept_registries():
        am.register_model("absent_net", layer="features")(lambda num_classes, mean, std: None)
        am.register_dataset("absent_data", description="", image_size=8)(lambda root, split: None)
        with pytest.raises(ValueError, match=r"builds 'absent_net' must return an nn\.Module, got"):
            models.build(NetSpec("absent_net"), 2, (0.5,) * 3, (0.5,) * 3, 8)
        with pytest.raises(ValueError, match="loads 'absent_data' must return an ImageSet, got No"):
            datasets.load("absent_data", "train")
        with pytest.raises(ValueError, match=r"width=4 does not apply .* its options are none"):
            models.build(NetSpec("absent_net", width=4), 2, (0.5,) * 3, (0.5,) * 3, 8)


def test_a_name_is_given_once_and_a_file_may_be_read_again(plugins):
    for registry, name in ((MODELS, "outside_net"), (DATASETS, "outside_data")):
        with pytest.raises(ValueError, match=f"{name!r} is registered already"):
            registry.add(name, replace(registry[name], function=lambda: None))
    exec(compile(MODEL, "again", "exec"), {"__name__": MODELS["outside_net"].function.__module__})


def test_an_argument_of_a_task_that_nobody_gives_is_named(plugins, monkeypatch):
    def needy(model, batches, *, weather):
        return []

    monkeypatch.setitem(TASKS._entries, "needy", replace(TASKS["accuracy"], function=needy))
    images = datasets.load("outside_data", "test")
    with pytest.raises(ValueError, match="the argument 'weather' of the task 'needy' needs a def"):
        evaluate(torch.nn.Flatten(), images, tasks=["needy"])
