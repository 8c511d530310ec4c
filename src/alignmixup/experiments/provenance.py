"""The origin of a result: the run; versions, hardware, commit, date and command."""

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

from alignmixup.contracts import RecipeKey
from alignmixup.device import hardware
from alignmixup.experiments.run_folder import read_run
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.recipes.catalog import find_recipe, recipe_names
from alignmixup.recipes.schema import Recipe
from alignmixup.training.ledger import LEDGER, read_ledger


def origin(recipe: Recipe, epoch: int, folder: Path | None = None) -> dict[str, object]:
    """Return what a result records of its run: recipe, seed, epoch and settings of training.

    The ledger in ``folder`` has the precision it was computed in, and the style network's weights.
    """
    trained = recipe.chosen() | ({} if folder is None else _beginnings(folder))
    events: list[dict[str, Any]] = []
    if folder is not None and (folder / LEDGER).exists():
        events = cast(list[dict[str, Any]], read_ledger(folder / LEDGER))
    trained |= _computed(events)
    if isinstance(recipe.mixer, StyleMixer):
        for used in (event for event in events if event["event"] == "style_weights"):
            trained["mixer.weights"] = used["kind"]
            trained["style_weights"] = {k: used[k] for k in ("kind", "sha256", "metadata")}
    return {
        "key": recipe.key,
        "base": recipe.base,
        "seed": recipe.train.seed,
        "epoch": epoch,
        "trained": trained,
    }


def _beginnings(folder: Path) -> dict[str, object]:
    """What else was trained: by which plugins, where, from another's weights, or extended."""
    record = read_run(folder)
    found: dict[str, object] = {}
    if record.plugin_sha256:
        named = (f"{name} {digest}" for name, digest in sorted(record.plugin_sha256.items()))
        found["plugins"] = ", ".join(named)
    if record.first_data is not None:  # one path for results of before and after a move
        found["data.name"] = record.first_data
    if record.init_from is not None:
        found["init_from"] = record.init_from["recipe"]
    if record.extended:
        found["extended"] = list(record.extended)
    return found


def recipe_settings(key: RecipeKey) -> dict[str, object] | None:
    """Return what ``origin`` records as ``trained`` for an unchanged run of the recipe of this key.

    None if no registered recipe has it.
    """
    if key.name not in recipe_names() or (recipe := find_recipe(key.name)).key != key:
        return None
    settings = recipe.chosen()
    if isinstance(recipe.mixer, StyleMixer) and not recipe.mixer.weights:
        settings["mixer.weights"] = "small"  # the run trains its own
    return settings


def _computed(events: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the precision and memory layout of a run, where they are not torch's defaults.

    A run that was resumed, or extended, in another precision names both.
    """
    found = [event for event in events if "compute" in event]
    if not found:
        return {}
    precision = current = found[0]["compute"]["precision"]
    done = 0
    for event in events:
        done = event["epoch"] if event["event"] == "epoch" else done
        if "compute" in event and event["compute"]["precision"] != current:
            current = event["compute"]["precision"]
            precision += f", {current} from epoch {done + 1}"
    computed = {"train.precision": precision} if precision != "float32" else {}
    if found[0]["compute"]["channels_last"]:
        computed["train.channels_last"] = True
    return computed


def provenance(device: torch.device | None = None) -> dict[str, object]:
    """Return versions, hardware, commit, date and command of a measurement.

    The hardware is that of ``device``; defaults to a GPU where there is one.
    """
    ours = package_version("alignmixup") or "source"  # a source tree that is not installed
    python = platform.python_version()
    return {
        "version": f"alignmixup {ours}, torch {torch.__version__}, Python {python}",
        "hardware": hardware(device),
        "commit": os.environ.get("ALIGNMIXUP_COMMIT") or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
    """Return the command line of ``alignmixup``; empty in another program."""
    program = Path(sys.argv[0])
    is_module = program.name == "__main__.py"  # python -m alignmixup
    name = program.parent.name if is_module else program.stem
    return shlex.join(["alignmixup", *sys.argv[1:]]) if name == "alignmixup" else ""
