"""The small network that figures without a run are made with, and where figures get theirs from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer, Result
from alignmixup.experiments.decoding import DecoderSettings, open_painter, train_decoder
from alignmixup.experiments.painters import OwnDecoder, Painter
from alignmixup.experiments.provenance import origin, provenance
from alignmixup.experiments.run import Sets, train
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.mixers import AlignMixup, AlignMixupAE, NoMix
from alignmixup.models.zoo import NetSpec
from alignmixup.recipes.schema import DataSpec, Recipe
from alignmixup.training import TrainSettings

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "DecodedSource",
    "built_in_run",
    "decoded_source",
    "small_recipe",
    "write_lines",
]


@dataclass(frozen=True)
class BuiltIn:
    """The small network that figures without a run are made with, and how long it is trained.

    A PreActResNet-18 of this width with a pooled head, trained without mixing: with mixing it takes
    several times as long to see anything in shapes. Its decoder reads ``layer``, 8 x 8 positions.
    """

    width: int = 8
    layer: str = "layer3"
    epochs: int = 8
    decoder_epochs: int = 6
    num_train: int = 5000
    num_test: int = 1000
    head_epochs: int = 4
    head_images: int = 2000

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


def built_in_run(folder: Path, seed: int = 0) -> Path:
    """Train the small network and its decoder in ``folder``, or go on with what is there."""
    settings = BUILT_IN
    print(
        f"a small network and its decoder, trained once on the built-in shapes in {folder} "
        "(two to three minutes on two cores)",
        file=sys.stderr,
    )
    net = NetSpec("preact_resnet18", width=settings.width)
    recipe = small_recipe("r18-baseline", net, NoMix(), settings.epochs, seed)
    sets = settings.sets(settings.num_train)
    if not train(recipe, folder, sets=sets).is_complete:
        raise ValueError(f"the training in {folder} was stopped: run again to go on")
    decoder = DecoderSettings(
        settings.layer, epochs=settings.decoder_epochs, batch_size=32, lr=3e-3, seed=seed
    )
    print(train_decoder(folder, decoder, sets=sets, device="cpu"), file=sys.stderr)
    return folder


def small_recipe(name: str, net: NetSpec, mixer: Mixer, epochs: int, seed: int) -> Recipe:
    """A recipe for shapes and one core; ``name`` without that of the data."""
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
    return Recipe(f"shapes-{name}", DataSpec("shapes", flip=False), net, mixer, settings)


def decoded_source(out: Path, run: Path | None, seed: int, data_root: Path | None) -> DecodedSource:
    """The run with its decoder and test images, or the built-in one."""
    if run is None:
        run = built_in_run(out / f"shapes-seed{seed}", seed)
        images = BUILT_IN.sets(1).test
        recipe = read_recipe(run)
    else:
        recipe = read_recipe(run)
        images = datasets.load(recipe.data.name, "test", data_root)
    opened, painter = open_painter(run, images.num_classes, images.images.shape[-1])
    is_own = isinstance(painter, OwnDecoder)
    decoder = "its own decoder" if is_own else f"decoder of {painter.layer}"
    what = f"{recipe.name}, {opened.epoch} epoch{'' if opened.epoch == 1 else 's'}, {decoder}"
    mixer = recipe.mixer
    if isinstance(mixer, AlignMixup | AlignMixupAE):
        eps, num_iters = mixer.eps, mixer.num_iters
    else:
        eps, num_iters = AlignMixup.eps, AlignMixup.num_iters
    return DecodedSource(painter, images, what, eps, num_iters, recipe, opened.epoch)


def write_lines(results: Sequence[Result], path: Path) -> Path:
    """Write results as JSON lines, in the place of those of an earlier figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(result.to_json() + "\n" for result in results), encoding="utf-8")
    return path
