"""A recipe made into a run: data, network, loader and engine put together, in one folder.

OUT/run.json                 the recipe, every setting
OUT/ledger.jsonl             one line an epoch
OUT/checkpoint.safetensors   weights, momentum, generators
OUT/results.jsonl            one line a figure: accuracy at the end, then what ``evaluate`` adds
OUT/adain.safetensors        for style mixing without weights of its own: a small network
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from alignmixup import data, nets
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.data.folder import FileSet
from alignmixup.mixing import (
    AlignMixup,
    AlignMixupAE,
    Effect,
    StyleCutMix,
    StyleMix,
    alignment_effect,
)
from alignmixup.mixing.adain import save_adain
from alignmixup.mixing.adain_fit import train_small_adain
from alignmixup.recipes.batches import (
    eval_batches,
    load_split,
    sample_images,
    side_of,
    train_batches,
)
from alignmixup.recipes.catalogue import find_recipe
from alignmixup.recipes.schema import Recipe, changed
from alignmixup.tasks.accuracy import accuracy
from alignmixup.train import Summary, fit, join_team
from alignmixup.train.checkpoint import load_weights
from alignmixup.train.engine import CHECKPOINT

__all__ = [
    "RESULTS",
    "RUN",
    "Run",
    "Sets",
    "append_results",
    "open_run",
    "provenance",
    "train",
    "write_json",
]

RUN = "run.json"
RESULTS = "results.jsonl"
ADAIN = "adain.safetensors"
ADAIN_STEPS = 4000
ADAIN_IMAGES = 5000

# Where and how often, not what: a run may go on with other values of these.
FREE_SETTINGS = ("device", "capture", "compile", "eval_every")


@dataclass(frozen=True)
class Sets:
    """The two splits a run needs."""

    train: ImageSet
    test: ImageSet


@dataclass(frozen=True)
class Run:
    """A trained run, read back: its recipe, its network with the weights of the last checkpoint."""

    recipe: Recipe
    net: nn.Module
    epoch: int
    folder: Path


def train(
    recipe: Recipe | str,
    out: Path | str,
    *,
    changes: Mapping[str, object] | None = None,
    data_root: Path | str | None = None,
    sets: Sets | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
) -> Summary:
    """Train a recipe in the folder ``out``, or go on with the run that is there.

    Started by torchrun, every process calls this and takes its share of each batch.

    ``changes`` replaces settings by their names on the command line, ``{"train.epochs": 300}``;
    ``sets`` stands in for the recipe's data.
    """
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe = changed(recipe, changes or {})
    folder = Path(out)
    _check_folder(folder, recipe)
    team, device = join_team(pick_device(recipe.train.device))
    with team.leader_first():  # it decodes, the others read what it has decoded
        train_set = sets.train if sets else load_split(recipe.data, "train", data_root)
        test_set = sets.test if sets else load_split(recipe.data, "test", data_root)
    net = build_net(recipe, train_set, device)
    settings = recipe.train
    loader = train_batches(recipe.data, settings, train_set, device, team)
    quiet = quiet or not team.is_leader
    notes: dict[str, dict[str, object]] = {"provenance": provenance()}
    effect = first_effect(recipe, net, loader)
    if effect is not None:
        notes["alignment_effect"] = dataclasses.asdict(effect)
        if effect.is_next_to_nothing and not quiet:
            print(f"note: {effect}: the aligned cases train as manifold mixup at this layer would")
    writer = _tensorboard(folder) if tensorboard and team.is_leader else None
    if isinstance(recipe.mixer, StyleMix | StyleCutMix) and recipe.mixer.weights:
        recipe.mixer.describe()  # or an error that says what is wrong with them
    with team.leader_first():
        _claim(folder, recipe)  # nothing that can be missing is missing: the folder is ours now
        mixer = with_style_weights(recipe, train_set, folder, device)
    if isinstance(mixer, StyleMix | StyleCutMix):
        notes["style_weights"] = dict(mixer.describe())
    with _alone_in(folder) if team.is_leader else nullcontext():
        summary = fit(
            net,
            mixer,
            loader,
            _Evaluator(recipe, test_set, device),
            settings,
            folder,
            notes=notes,
            writer=writer,
            quiet=quiet,
            team=team,
        )
    if summary.is_complete and team.is_leader:
        _record_accuracy(folder, recipe, summary)
    return summary


def open_run(folder: Path | str, num_classes: int, image_size: int, device: str = "auto") -> Run:
    """Read a run back: its recipe and its network with the last checkpoint's weights."""
    place = Path(folder)
    recipe = read_recipe(place)
    settings = recipe.train
    spec = dataclasses.replace(recipe.net, pretrained=False)  # the checkpoint has all weights
    net = nets.build(spec, num_classes, (0.0,) * 3, (1.0,) * 3, image_size, seed=settings.seed)
    facts = load_weights(net, place / CHECKPOINT)  # the normalisation is among the weights
    net.to(pick_device(device))
    return Run(recipe, net.eval(), int(str(facts["epoch"])), place)


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of the run in ``folder``."""
    path = folder / RUN
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {folder} is not the folder of a run")
    try:
        return Recipe.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def build_net(recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> nn.Module:
    """Build the recipe's network for these images, on ``device`` and in its memory layout."""
    size = side_of(recipe.data, images)
    net = nets.build(
        recipe.net, images.num_classes, images.mean, images.std, size, seed=recipe.train.seed
    )
    # On the CPU never: convolutions of narrow channels_last networks crash there (torch 2.13).
    is_last = recipe.train.channels_last and device.type == "cuda"
    layout = torch.channels_last if is_last else torch.preserve_format
    return net.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def first_effect(
    recipe: Recipe, net: nn.Module, loader: data.DeviceLoader | data.StreamLoader
) -> Effect | None:
    """How much alignment changes on the first batch, where the method aligns."""
    mixer = recipe.mixer
    if not isinstance(mixer, AlignMixup | AlignMixupAE) or not mixer.aligned:
        return None
    if loader.batch_size < 2:  # nobody to align with
        return None
    x, _ = next(loader.epoch(0))
    return alignment_effect(net, mixer.layer, x[:64], eps=mixer.eps, num_iters=mixer.num_iters)


def with_style_weights(
    recipe: Recipe, images: ImageSet | FileSet, folder: Path, device: torch.device
) -> Mixer:
    """Give a style mixer that names no weights a small network trained on these images.

    It is made once and kept in the run's folder; any other mixer comes back as it is.
    """
    mixer, seed = recipe.mixer, recipe.train.seed
    if not isinstance(mixer, StyleMix | StyleCutMix) or mixer.weights:
        return mixer
    path = folder / ADAIN
    if not path.exists():
        some = sample_images(recipe.data, images, ADAIN_IMAGES, seed)
        net = train_small_adain(some, steps=ADAIN_STEPS, seed=seed, device=device)
        partial = path.with_name("partial-" + ADAIN)
        save_adain(net, partial, {"data": images.name, "steps": str(ADAIN_STEPS)})
        os.replace(partial, path)
    return dataclasses.replace(mixer, weights=str(path))


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda, cuda:1 or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no GPU; use cpu or auto")
    return device


def provenance() -> dict[str, object]:
    """Where a figure comes from: versions, hardware, commit, date, command."""
    hardware = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
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


def _command() -> str:
    """The command line that is being run; nothing where we are a library in another program."""
    program = Path(sys.argv[0])
    is_ours = program.name == "alignmixup" or program.parent.name == "cli"
    return shlex.join(["alignmixup", *sys.argv[1:]]) if is_ours else ""


def append_results(folder: Path, results: list[Result]) -> None:
    """Append results to the run's file; nothing is ever overwritten.

    A last line that a kill or a full disk has cut short goes: what is appended behind it would be
    part of it.
    """
    path = folder / RESULTS
    try:
        with path.open("ab") as file:
            kept, size = _whole_lines(path), file.tell()
            file.truncate(min(len(kept), size))
            lines = "".join(result.to_json() + "\n" for result in results)
            file.write(kept[size:] + lines.encode())
    except OSError as error:
        raise OSError(f"cannot write the results to {path}: {error.strerror}") from error


def _whole_lines(path: Path) -> bytes:
    """The lines of a file that are whole, each with its end; of no file none."""
    text = path.read_bytes() if path.exists() else b""
    end = text.rfind(b"\n") + 1
    try:
        json.loads(text[end:])
    except ValueError:  # cut short, or nothing there
        return text[:end]
    return text + b"\n"


class _Evaluator:
    """Top-1 on the test set, in the precision of training."""

    def __init__(self, recipe: Recipe, images: ImageSet | FileSet, device: torch.device) -> None:
        self._batches = eval_batches(recipe.data, recipe.train, images, device)
        self._amp = torch.bfloat16 if recipe.train.precision == "bf16" else None

    def __call__(self, net: nn.Module) -> dict[str, float]:
        results = accuracy(net, self._batches, amp_dtype=self._amp)
        return {r.metric: r.value for r in results if r.metric in ("top1", "top5")}


def _claim(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into the folder of a new run."""
    path = folder / RUN
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, recipe.to_json())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder: the two would write each other's checkpoints.

    The lock is the system's and goes with the process, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    with (folder / RUN).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {folder}: wait for it, or take another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a record whole or not at all, whenever the process is killed."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2), encoding="utf-8")
    os.replace(partial, path)


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """Raise where the folder holds a run of another recipe, or something else altogether."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, where the folder of the run should be: other --out")
    if not (folder / RUN).exists():
        # A run killed while it claimed its folder leaves these at most.
        beginnings = {f"{RUN}.partial", "tensorboard"}
        if folder.is_dir() and {path.name for path in folder.iterdir()} - beginnings:
            raise ValueError(f"{folder} is not empty and holds no run; choose another --out")
        return
    there, ours = read_recipe(folder).to_json(), recipe.to_json()
    differences = _differences(there, ours)
    if differences:
        raise ValueError(
            f"{folder} holds a run of {there['name']} with other settings "
            f"({'; '.join(differences)}); choose another --out"
        )


def _differences(there: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted({*there, *ours}):
        a, b = there.get(key), ours.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{prefix}{key}.")
        elif (list(a) if isinstance(a, tuple) else a) != (list(b) if isinstance(b, tuple) else b):
            if prefix == "train." and key in FREE_SETTINGS:
                continue
            found.append(f"{prefix}{key}: {a} there, {b} now")
    return found


def _record_accuracy(folder: Path, recipe: Recipe, summary: Summary) -> None:
    """Append best, last and median of the last ten, each once."""
    there = _whole_lines(folder / RESULTS)
    figures = {
        "top1_median10": summary.median10,
        "top1_last": summary.last,
        "top1_best": summary.best,
    }
    where = {"recipe": recipe.name, "seed": recipe.train.seed, "epoch": summary.epochs}
    append_results(
        folder,
        [
            Result("accuracy", metric, value).stamped(**where, **provenance())
            for metric, value in figures.items()
            if value is not None and f'"metric": "{metric}"'.encode() not in there
        ],
    )


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            "TensorBoard is not installed: pip install 'alignmixup[logging]'"
        ) from None
    return SummaryWriter(folder / "tensorboard")


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
