"""Classes and recipes of a user's file: trained, killed, resumed, evaluated, reported, opened."""

import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from torch import nn

import alignmixup as am
from alignmixup.cli import main
from alignmixup.datasets import shapes
from alignmixup.experiments import sweep as sweeps
from alignmixup.experiments.plugins import digests_of, open_recipe, warn_of_edits
from alignmixup.experiments.provenance import recipe_settings
from alignmixup.experiments.run_folder import read_run
from alignmixup.experiments.sweep import sweep
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import Recipe
from alignmixup.report.folding import fold
from alignmixup.report.measures import Measure
from alignmixup.report.reading import read_results
from kept_registries import kept_registries

PLUGIN = '''
import os
import signal
from dataclasses import dataclass

import alignmixup as am
from alignmixup.contracts import RecipeKey
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings


draws = []


@am.register_mixer
@dataclass(frozen=True)
class OutsideMixup(am.InputMixup):
    """Input mixup that can be killed in the middle of an epoch."""

    gentle: bool = True

    def draw(self, batch_size, rng, progress=0.0):
        draws.append(batch_size)
        if "KILL" in os.environ and len(draws) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().draw(batch_size, rng, progress)


def outside():
    return Recipe(
        key=RecipeKey("shapes", "r18", "outside"),
        data=DataSpec("shapes", limit=40),
        net=NetSpec("preact_resnet18", width=2),
        mixer=OutsideMixup(),
        train=TrainSettings(epochs=4, batch_size=20, lr=0.02, milestones=(), device="cpu"),
    )


def not_a_recipe():
    return 3
'''

# What a user does after the kill, in another process: the plugin is named by the run alone.
LATER = """
import sys
import torch
from alignmixup.cli import main
import alignmixup as am

torch.set_num_threads(1)
folder, recipe = sys.argv[1:3]
killed = am.load_run(folder, device="cpu")
assert type(killed.recipe.mixer).__name__ == "OutsideMixup"
assert 1 <= killed.epoch < 4, killed.epoch
for words in (
    ["train", recipe, "--out", folder],
    ["evaluate", folder, "--tasks", "accuracy", "calibration"],
    ["report", folder],
    ["export", folder, folder + "/net.safetensors"],
):
    assert main(words) == 0, words
assert am.load_run(folder).summary.is_complete
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "outside_plugin.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.slow
def test_an_outside_mixer_and_recipe_train_die_resume_and_are_scored(plugin, tmp_path):
    run, recipe = tmp_path / "run", f"{plugin}:outside"
    words = [sys.executable, "-m", "alignmixup", "train", recipe, "--out", str(run)]
    killed = subprocess.run(words, env={**os.environ, "KILL": "1"}, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads((run / "run.json").read_text())["plugins"] == [str(plugin)]
    later = subprocess.run(
        [sys.executable, "-c", LATER, str(run), recipe], capture_output=True, text=True
    )
    assert later.returncode == 0, later.stderr
    assert "Calibration" in later.stdout
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    assert {line["key"]["method"] for line in lines} == {"outside"}
    assert {line["trained"]["mixer"] for line in lines} == {"OutsideMixup"}


def train_once(plugin, out, *, extend=False, **changes):
    """Train as a process of its own would, which imports the plugin as it is now."""
    with kept_registries():
        recipe = open_recipe(f"{plugin}:outside")
        changes = {"train.epochs": 1, **changes}
        return am.train(recipe, out, changes=changes, extend=extend, quiet=True)


def test_seeds_of_an_edited_plugin_are_rows_of_their_own(plugin, tmp_path):
    """They were averaged."""
    for seed in range(3):
        if seed == 2:
            plugin.write_text(f"{PLUGIN}\nstronger = True\n")
        train_once(plugin, tmp_path / f"run{seed}", **{"train.seed": seed})
    first, edited = (
        hashlib.sha256(text.encode()).hexdigest()[:8] for text in (PLUGIN, plugin.read_text())
    )
    record = json.loads((tmp_path / "run2" / "run.json").read_text())
    assert record["plugin_sha256"] == {"outside_plugin": edited}
    measures = [Measure("accuracy", "top1_last")]
    found = fold(read_results([tmp_path]), measures, "last", (), recipe_settings)
    assert {(dict(row.settings)["plugins"], *cell) for (row, _), cell in found.cells.items()} == {
        (f'"outside_plugin {first}"', 0, 1),
        (f'"outside_plugin {edited}"', 2),
    }
    alike = fold(read_results([tmp_path / "run0"]), measures, "last", (), recipe_settings)
    assert not any(row.settings for row, _ in alike.cells)  # nothing to tell apart


def test_a_run_that_goes_on_with_an_edited_plugin_says_so(plugin, tmp_path):
    train_once(plugin, tmp_path / "run")
    train_once(plugin, tmp_path / "run")
    plugin.write_text(f"{PLUGIN}\nstronger = True\n")
    train_once(plugin, tmp_path / "run")  # nothing is left to train
    with pytest.warns(UserWarning, match="begun with another version of the plugin outside_pl"):
        train_once(plugin, tmp_path / "run", extend=True, **{"train.epochs": 2})


def test_a_recipe_of_a_file_is_a_function_that_returns_one(plugin, capsys):
    recipe = open_recipe(f"{plugin}:outside")
    assert (recipe.name, type(recipe.mixer).__name__) == ("shapes-r18-outside", "OutsideMixup")
    with pytest.raises(ValueError, match="has no function 'outsid'; did you mean 'outside'"):
        open_recipe(f"{plugin}:outsid")
    with pytest.raises(ValueError, match="not_a_recipe must return a Recipe, got int"):
        open_recipe(f"{plugin}:not_a_recipe")
    with pytest.raises(SystemExit):
        main(["train", f"{plugin}:outside", "--help"])
    assert "--mixer.gentle" in capsys.readouterr().out


def test_a_recorded_plugin_that_is_gone_is_named_and_may_be_passed(plugin, tmp_path, capsys):
    record = am.registry.import_plugin(str(plugin))
    recipe = open_recipe(f"{plugin}:outside")
    gone = str(tmp_path / "before" / "outside_plugin.py")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**recipe.to_json(), "plugins": [gone]}))
    assert record != gone
    assert read_run(tmp_path / "run").recipe == recipe  # the file of that name is imported
    path.write_text(json.dumps({**recipe.to_json(), "plugins": ["no_such_plugin"]}))
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert "trained with the plugin no_such_plugin, which cannot be imp" in capsys.readouterr().err
    (tmp_path / "later.py").write_text("print(no_such_name)")
    path.write_text(json.dumps({**recipe.to_json(), "plugins": [str(tmp_path / "later.py")]}))
    with pytest.raises(ValueError, match=r"\(NameError: .*under the same name 'later'"):
        read_run(tmp_path / "run")
    kind = {**recipe.to_json()["mixer"], "kind": "OutsideMixop"}
    path.write_text(json.dumps({**recipe.to_json(), "mixer": kind}))
    with pytest.raises(ValueError, match=r"did you mean 'OutsideMixup'.*--plugin MODULE"):
        read_run(tmp_path / "run")


def test_a_run_of_a_sweep_imports_the_plugins_before_its_recipe(plugin, tmp_path, monkeypatch):
    """The class of a plugin cannot be unpickled in a process that has not imported it."""
    told = []
    monkeypatch.setattr(sweeps._Crew, "poll", lambda crew: crew.jobs and crew._start(0))

    class Process:
        def __init__(self, target, daemon):
            told.append(target.args)

        def start(self):
            pass

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Process", Process)
    (job,) = sweep([f"{plugin}:outside"], tmp_path / "out", changes={"train.epochs": 1})
    ((recipe, folder, _, plugins),) = told
    assert str(plugin) in plugins
    assert Recipe.from_json(json.loads(json.dumps(recipe))) == job.recipe
    assert folder == tmp_path / "out" / "shapes-r18-outside-seed0"


def test_the_module_of_a_mixer_is_recorded_like_a_plugin(tmp_path, monkeypatch):
    """A script that imports its mixer from a module leaves a run that can be opened elsewhere."""
    source = PLUGIN.replace("OutsideMixup", "ImportedMixup")
    (tmp_path / "my_mixers.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = importlib.import_module("my_mixers").outside()
    run = am.train(recipe, tmp_path / "run", changes={"train.epochs": 1}, quiet=True)
    assert "my_mixers" in read_run(run.folder).plugins
    assert type(am.load_run(run.folder).recipe.mixer).__name__ == "ImportedMixup"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my_mixers.py").write_text(source.replace("Imported", "Moved"))
    am.registry.import_plugin(str(tmp_path / "elsewhere" / "my_mixers.py"))
    monkeypatch.delitem(sys.modules, "my_mixers")
    (tmp_path / "my_mixers.py").unlink()
    read_run(run.folder)  # a plugin of that name is imported already


def test_two_plugins_of_one_name_are_both_recorded(tmp_path, monkeypatch):
    """An edit of the first one was not seen."""
    monkeypatch.setattr(am.plugins, "_plugins", {})
    names, sources = [], ("one = 1\n", "two = 2\n")
    for folder, source in zip("ab", sources, strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(source)
        names.append(am.registry.import_plugin(str(tmp_path / folder / "twin.py")))
    both = sorted(hashlib.sha256(source.encode()).hexdigest()[:8] for source in sources)
    assert digests_of(names) == digests_of(names[::-1]) == {"twin": "+".join(both)}
    with pytest.warns(UserWarning, match="another version of the plugin twin"):
        warn_of_edits(tmp_path, digests_of(names[1:]))
    assert digests_of([names[0], names[0]]) == digests_of(names[:1])


def test_a_task_of_the_plugin_of_a_run_is_known(tmp_path):
    """The run names the plugin, so that evaluate need not; here up to the missing checkpoint."""
    path = tmp_path / "tasks_plugin.py"
    path.write_text("import alignmixup as am\nam.register_task('own_score')(lambda m, b: 3)\n")
    record = {**find_recipe("cifar10-r18-input-fast").to_json(), "plugins": [str(path)]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        am.evaluate(tmp_path / "run", shapes("test", 2), tasks=["own_score"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    with pytest.raises(ValueError, match="'own_score' must return a list of Result, got 3"):
        am.evaluate(model, shapes("test", 2), tasks=["own_score"])
    am.register_task("misnamed")(lambda model, batches: [am.Result("missnamed", "mean", 1.0)])
    with pytest.raises(ValueError, match="'misnamed' returned a Result of the task 'missnamed'"):
        am.evaluate(model, shapes("test", 2), tasks=["misnamed"])


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("import no_such_package", "{tmp}/p.py", "p.py imports a module that is not installed: No"),
        ("", ".", "'.' is no plugin: give the name of a module"),
        ("", "..", "'..' is no plugin"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(tmp_path, capsys, text, name, message):
    (tmp_path / "p.py").write_text(text)
    assert main(["--plugin", name.format(tmp=tmp_path), "recipes"]) == 1
    assert message in capsys.readouterr().err


def test_a_recipe_needs_a_function_and_a_mixer_that_can_be_recorded():
    with pytest.raises(ValueError, match=r"name its function as well: mine\.py:FUNCTION"):
        open_recipe("mine.py")

    class Bare(am.Mixer):
        cases = draw = apply = lambda self, *rest: None

    for mixer in (Bare(), am.CutMix):
        with pytest.raises(ValueError, match=r"mixer must be an instance of a dataclass"):
            dataclasses.replace(find_recipe("cifar10-r18-input-fast"), mixer=mixer)
