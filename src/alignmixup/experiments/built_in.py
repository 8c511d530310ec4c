"""The small networks that figures without a run are made with.

Each is trained once for a folder of figures, in OUT/built-in/NAME-KEY, where the key is that of its
recipe and its images: other figures find it there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer, RecipeKey, Result
from alignmixup.experiments.data_record import Sets
from alignmixup.experiments.decoding import (
    DecoderSettings,
    align_settings,
    open_painter,
    train_decoder,
)
from alignmixup.experiments.painters import OwnDecoder, Painter
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run import train
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.experiments.scoring import run_images
from alignmixup.files import write_text
from alignmixup.mixers.nomix import NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings, summarize
from alignmixup.training.ledger import LEDGER


@dataclass(frozen=True)
class BuiltIn:
    """The sizes of the small networks, and how long they are trained.

    Figures of decoded features have a PreActResNet-18 of this width with a pooled head, trained
    without mixing: with mixing it takes several times as long to see anything in shapes. Its
    decoder reads ``layer``, 8 x 8 positions. ``head_*`` are those of the figure ``heads``, and
    ``wrn_epochs`` those of the narrow WRN16-8 of ``reliability`` and ``localization``.
    """

    width: int = 8
    layer: str = "layer3"
    epochs: int = 8
    decoder_epochs: int = 6
    num_train: int = 5000
    num_test: int = 1000
    head_epochs: int = 4
    head_images: int = 2000
    wrn_epochs: int = 10

    def sets(self, num_train: int) -> Sets:
        return Sets(datasets.shapes("train", num_train), datasets.shapes("test", self.num_test))


BUILT_IN = BuiltIn()


@dataclass(frozen=True)
class DecodedSource:
    """A network with its decoder, images, and what a title calls them."""

    painter: Painter
    images: ImageSet
    what: str
    eps: float
    num_iters: int
    recipe: Recipe
    epoch: int

    def where(self) -> dict[str, object]:
        """The provenance of what is measured on it."""
        return {**origin(self.recipe, self.epoch), **provenance()}


def train_built_in(recipe: Recipe, out: Path, sets: Sets) -> Path:
    """Return the folder below ``out`` where the recipe is trained; train it, or resume, if need be.

    Raises:
        ValueError: If the training was stopped before its end.
    """
    what = [recipe.to_json(), *((s.name, s.split, len(s)) for s in (sets.train, sets.test))]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
    folder = out / "built-in" / f"{recipe.name}-{key}"
    if (folder / LEDGER).exists() and summarize(folder).is_complete:
        return folder
    print(f"training a small network on the built-in shapes, once, in {folder}", file=sys.stderr)
    if not train(recipe, folder, sets=sets).summary.is_complete:
        raise ValueError(f"the training in {folder} was stopped; run the command again to resume")
    return folder


def localizer(out: Path, seed: int = 0) -> tuple[Path, ImageSet]:
    """The folder of a trained classifier whose maps are fine enough for boxes, and test images."""
    epochs = BUILT_IN.wrn_epochs
    # Narrow, for a CPU; its last map is 8 x 8.
    key, net = RecipeKey("shapes", "wrn16-8", "baseline"), NetSpec("wrn16_8", width=1)
    recipe = small_recipe(key, net, NoMix(), epochs, seed)
    settings = replace(recipe.train, batch_size=50, lr=0.1, warmup_epochs=0.5, eval_every=epochs)
    recipe = replace(recipe, train=settings)
    sets = BUILT_IN.sets(BUILT_IN.num_train)
    return train_built_in(recipe, out, sets), sets.test


def _decoded_run(out: Path, seed: int) -> Path:
    """The folder of the small network with its decoder."""
    settings, key = BUILT_IN, RecipeKey("shapes", "r18", "baseline")
    net = NetSpec("preact_resnet18", width=settings.width)
    recipe = small_recipe(key, net, NoMix(), settings.epochs, seed)
    sets = settings.sets(settings.num_train)
    folder = train_built_in(recipe, out, sets)
    decoder = DecoderSettings(
        settings.layer, epochs=settings.decoder_epochs, batch_size=32, lr=3e-3, seed=seed
    )
    print(train_decoder(folder, decoder, sets=sets, device="cpu"), file=sys.stderr)
    return folder


def small_recipe(key: RecipeKey, net: NetSpec, mixer: Mixer, epochs: int, seed: int) -> Recipe:
    """Return a recipe for the built-in shapes and one core."""
    settings = TrainSettings(
        epochs=epochs,
        batch_size=64,
        lr=0.05,
        nesterov=True,
        weight_decay=5e-4,
        schedule="cosine",
        milestones=(),
        warmup_epochs=1.0 if epochs > 1 else 0.0,
        seed=seed,
        device="cpu",
    )
    return Recipe(key, DataSpec("shapes", flip=False), net, mixer, settings)


def decoded_source(out: Path, run: Path | None, seed: int, data_root: Path | None) -> DecodedSource:
    """The run with its decoder and test images, or the built-in one."""
    if run is None:
        run = _decoded_run(out, seed)
        images = BUILT_IN.sets(1).test
        recipe = read_recipe(run)
    else:
        recipe = read_recipe(run)
        images = run_images(run, data_root)
    opened, painter = open_painter(run, images.num_classes, images.images.shape[-1])
    is_own = isinstance(painter, OwnDecoder)
    decoder = "its own decoder" if is_own else f"decoder of {painter.layer}"
    what = f"{recipe.name}, {opened.epoch} epoch{'' if opened.epoch == 1 else 's'}, {decoder}"
    return DecodedSource(painter, images, what, *align_settings(recipe.mixer), recipe, opened.epoch)


def write_lines(results: Sequence[Result], path: Path) -> Path:
    """Write results as JSON lines, in the place of those of an earlier figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(result.to_json() + "\n" for result in results))
    return path
