"""Where a figure comes from: the run; versions, hardware, commit, date and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMix
from alignmixup.recipes.catalogue import find_recipe, recipe_names
from alignmixup.recipes.schema import Recipe
from alignmixup.training.ledger import read_ledger
from alignmixup.training.trainer import LEDGER

__all__ = ["origin", "provenance", "recipe_settings"]


def origin(recipe: Recipe, epoch: int, folder: Path | None = None) -> dict[str, object]:
    """What a figure says of its run: recipe, seed, epoch, and the settings it was trained with.

    Which weights a style network had, the ledger in ``folder`` knows.
    """
    trained = recipe.chosen()
    if isinstance(recipe.mixer, StyleMix | StyleCutMix) and folder and (folder / LEDGER).exists():
        events = read_ledger(folder / LEDGER)
        for used in (event for event in events if event["event"] == "style_weights"):
            trained["mixer.weights"] = used["kind"]
            trained["style_weights"] = {k: used[k] for k in ("kind", "sha256", "metadata")}
    return {"recipe": recipe.name, "seed": recipe.train.seed, "epoch": epoch, "trained": trained}


def recipe_settings(name: str) -> dict[str, object] | None:
    """What ``origin`` records as ``trained`` for an unchanged run of the recipe of that name.

    The name of a run on other data is that of its recipe with the data exchanged: the first recipe
    of the catalogue that it can come from stands for it. None if there is none.
    """
    base = name if name in recipe_names() else _recipe_on_other_data(name)
    if base is None:
        return None
    recipe = find_recipe(base)
    settings = recipe.chosen()
    if isinstance(recipe.mixer, StyleMix | StyleCutMix) and not recipe.mixer.weights:
        settings["mixer.weights"] = "small"  # the run trains its own
    return settings


def _recipe_on_other_data(name: str) -> str | None:
    """The first recipe that has this name but for the word of its data."""
    mine = name.split("-")
    for other in recipe_names():
        words = other.split("-")
        k = words.index(find_recipe(other).data.name)
        if len(words) == len(mine) and words[:k] + words[k + 1 :] == mine[:k] + mine[k + 1 :]:
            return other
    return None


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """Where a figure comes from: versions, hardware, commit, date, command.

    The hardware is that of ``device``; unless it is given, a GPU where there is one.
    """
    hardware = platform.processor() or platform.machine()
    is_gpu = device.type == "cuda" if device is not None else torch.cuda.is_available()
    if is_gpu:
        hardware = torch.cuda.get_device_name(device)
    try:
        ours = version("alignmixup")
    except PackageNotFoundError:  # run from a source tree that is not installed
        ours = "source"
    python = platform.python_version()
    return {
        "version": f"alignmixup {ours}, torch {torch.__version__}, Python {python}",
        "hardware": hardware,
        "commit": os.environ.get("ALIGNMIXUP_COMMIT") or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def _commit() -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # an installed package is not in a checkout
        return ""
    return done.stdout.strip()


def _command() -> str:
    """The command line that is being run; nothing where we are a library in another program."""
    program = Path(sys.argv[0])
    is_ours = program.name == "alignmixup" or program.parent.name == "cli"
    return shlex.join(["alignmixup", *sys.argv[1:]]) if is_ours else ""
