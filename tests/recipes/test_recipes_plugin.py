"""A recipe in a file of the user, with its own mixer, is found, trained, opened and reported."""

import pytest

from alignmixup.cli import main
from alignmixup.contracts import RecipeKey
from alignmixup.datasets import shapes
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.load import load_run
from alignmixup.experiments.run import train
from alignmixup.recipes.catalog import find_recipe
from alignmixup.registry import MIXERS, RECIPES, import_plugin

FILE = """
from dataclasses import dataclass

import alignmixup as am


@am.register_mixer
@dataclass(frozen=True)
class PluginMixup(am.InputMixup):
    alpha: float = 0.3


@am.register_recipe
def mine() -> am.Recipe:
    return am.Recipe(
        am.RecipeKey("shapes", "r18-narrow", "plugin-mixup", "first"),
        am.DataSpec("shapes"),
        am.NetSpec("preact_resnet18", width=4),
        PluginMixup(alpha=0.4),
        am.TrainSettings(epochs=1, batch_size=8, milestones=(), device="cpu"),
    )
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    for registry in (RECIPES, MIXERS):
        len(registry)  # all built-in entries are there
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "my_recipes.py").write_text(FILE)
    import_plugin(str(tmp_path / "my_recipes.py"))


@pytest.mark.usefixtures("plugin")
def test_a_recipe_of_a_users_file_is_trained_opened_and_reported(tmp_path, capsys):
    recipe = find_recipe("shapes-r18-narrow-plugin-mixup-first")
    folder = tmp_path / "run"
    sets = Sets(shapes("train", 16), shapes("test", 8))
    assert train(recipe.name, folder, sets=sets, quiet=True).summary.is_complete
    opened = load_run(folder, device="cpu")
    assert opened.recipe == recipe
    assert type(opened.recipe.mixer).__name__ == "PluginMixup"
    assert opened.recipe.key == RecipeKey("shapes", "r18-narrow", "plugin-mixup", "first")
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "shapes, r18-narrow" in said
    # An unchanged run of a registered recipe: no setting differs.
    assert "plugin-mixup (first) " in said
