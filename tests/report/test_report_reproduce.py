"""Every cell the paper prints has a recipe and a command."""

import re

import pytest

from alignmixup.cli import main
from alignmixup.cli.program import COMMANDS
from alignmixup.evaluation.outliers import SOURCES
from alignmixup.experiments.detecting import KINDS
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.mixers.alignmixup_ae import AlignMixupAE, AlignMixupVAE
from alignmixup.mixers.comixup import CoMixup
from alignmixup.mixers.cutmix import CutMix
from alignmixup.mixers.cutout import Cutout
from alignmixup.mixers.input_mixup import InputMixup
from alignmixup.mixers.manifold_mixup import ManifoldMixup
from alignmixup.mixers.nomix import NoMix
from alignmixup.mixers.puzzlemix import PuzzleMix
from alignmixup.mixers.saliencymix import SaliencyMix
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.models.wsol import ErasingLoss
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.registry import TASKS
from alignmixup.report import paper
from alignmixup.report.reproduce import steps_of

NAMES = set(recipe_names())
PRINTED = [cell for cell in paper.FIGURES if cell.value is not None]
MIXERS = {
    "baseline": NoMix,
    "acol": ErasingLoss,
    "adl": NoMix,  # the network drops parts of its maps
    "cutout": Cutout,
    "input": InputMixup,
    "cutmix": CutMix,
    "manifold": ManifoldMixup,
    "puzzlemix": PuzzleMix,
    "comixup": CoMixup,
    "saliencymix": SaliencyMix,
    "stylemix": StyleMix,
    "stylecutmix": StyleCutMix,
    "alignmixup": (AlignMixup, AlignMixupAE),  # with e or E it needs an embedding
    "alignmixup-ae": AlignMixupAE,
    "alignmixup-vae": AlignMixupVAE,
}


@pytest.mark.parametrize("table", paper.TABLES)
def test_every_printed_cell_of_a_table_has_a_recipe(table):
    cells = [cell for cell in PRINTED if cell.table == table]
    assert cells
    for cell in cells:
        steps = steps_of(cell)
        assert steps.recipe in NAMES, (cell, steps)
        recipe = find_recipe(steps.recipe)
        data = "imagenet" if table == "detection" else cell.data
        assert recipe.data.name == data
        assert isinstance(recipe.mixer, MIXERS[cell.method]), cell
        if cell.aligned is not None and hasattr(recipe.mixer, "aligned") and "A" in cell.layers:
            assert recipe.mixer.aligned == cell.aligned, cell
        assert recipe.key.method == cell.method
        assert table == "detection" or recipe.key == paper.key_of(cell)


@pytest.mark.parametrize("cell", [c for c in PRINTED if c.top1_error is not None], ids=str)
def test_a_recipe_stands_beside_the_very_cell_it_is_found_by(cell):
    """Both ways agree: from the cell to the recipe, and from the recipe to its figure."""
    beside = paper.cell_beside(find_recipe(steps_of(cell).recipe).key)
    # The first rows of the ablation table are those of the classification table.
    assert beside == cell or (beside.table, cell.table, cell.layers) == ("cls", "ablation", "")
    assert beside.top1_error == cell.top1_error


def test_every_command_that_is_named_exists():
    for cell in PRINTED:
        steps = steps_of(cell)
        if not steps.command:
            # Training itself records it: best, last and median of the last ten epochs.
            assert cell.metric in ("top1", "top1_error", "top1_median10")
            continue
        command, target, *words = steps.command
        assert command in COMMANDS
        if command == "bench":
            assert target == steps.recipe
            assert cell.metric in ("params", "ms_per_batch")
            continue
        assert target == f"runs/{steps.recipe}-seed0"  # where ``train`` puts it
        if command == "detect":
            assert words[0] == "--data"
            kind = KINDS[words[1]]
            assert (kind.data, kind.network) == (cell.data, cell.network)
            continue
        assert (command, words[0]) == ("evaluate", "--tasks")
        assert words[1] in TASKS
        if words[1] == "ood":
            assert words[2:] == ["--ood", cell.source]
            assert cell.source in SOURCES


@pytest.mark.parametrize("table", paper.TABLES)
def test_a_table_is_listed_by_name(capsys, table):
    assert main(["recipes", "--table", table]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if re.match(r" +[\d.]+  ", line)]
    assert len(shown) == sum(cell.table == table for cell in PRINTED)
    recipes = {line for line in lines if line in NAMES}
    assert recipes == {steps_of(cell).recipe for cell in PRINTED if cell.table == table}


def test_a_table_is_narrowed_by_a_pattern_and_an_unknown_one_named(capsys):
    assert main(["recipes", "wrn16-8-alignmixup", "--table", "adv"]) == 0
    out = capsys.readouterr().out
    assert "cifar10-wrn16-8-alignmixup\n" in out
    assert "evaluate RUN --tasks fgsm" in out
    assert "puzzlemix" not in out
    assert main(["recipes", "tiny", "--table", "imgnet"]) == 1
    assert main(["recipes", "--table", "7"]) == 1
    assert "the paper has no table '7'; choose from cls," in capsys.readouterr().err
