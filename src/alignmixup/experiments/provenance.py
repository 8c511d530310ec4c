"""Where a figure comes from: the run; versions, hardware, commit, date and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from alignmixup.device import hardware
from alignmixup.mixers import StyleCutMix, StyleMix
from alignmixup.recipes.catalogue import find_recipe, recipe_names
from alignmixup.recipes.schema import Recipe
from alignmixup.training.ledger import LEDGER, read_ledger

__all__ = ["origin", "provenance", "recipe_settings"]


def origin(recipe: Recipe, epoch: int, folder: Path | None = None) -> dict[str, object]:
    """What a figure says of its run: recipe, seed, epoch, and the settings it was trained with.

    The ledger in ``folder`` has the precision it was computed in, and the style network's weights.
    """
    trained = recipe.chosen()
    ledger = None if folder is None else folder / LEDGER
    events: list[dict[str, Any]] = []
    if ledger is not None and ledger.exists():
        events = cast(list[dict[str, Any]], read_ledger(ledger))
    trained |= _computed(events)
    if isinstance(recipe.mixer, StyleMix | StyleCutMix):
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


def _computed(events: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The precision of a run and its memory layout, where they are not float32 and torch's own.

    A run that was resumed in another precision names both.
    """
    found = [event for event in events if "compute" in event]
    if not found:
        return {}
    precision = current = found[0]["compute"]["precision"]
    for event in found[1:]:
        if event["compute"]["precision"] != current:
            current = event["compute"]["precision"]
            precision += f", {current} from epoch {event['epoch'] + 1}"
    computed = {"train.precision": precision} if precision != "float32" else {}
    if found[0]["compute"]["channels_last"]:
        computed["train.channels_last"] = True
    return computed


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """Where a figure comes from: versions, hardware, commit, date, command.

    The hardware is that of ``device``; unless it is given, a GPU where there is one.
    """
    try:
        ours = version("alignmixup")
    except PackageNotFoundError:  # run from a source tree that is not installed
        ours = "source"
    python = platform.python_version()
    return {
        "version": f"alignmixup {ours}, torch {torch.__version__}, Python {python}",
        "hardware": hardware(device),
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
