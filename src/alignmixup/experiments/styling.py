"""Style networks for StyleMix and StyleCutMix, from any image set with one command.

A small AdaIN network is trained on images of the set (``training.adain_fit``), or the style
distances of its classes are added to existing weights, for instance the published ones. Either way
one file holds all that the mixers need, and its checksum identifies it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from alignmixup import datasets
from alignmixup.contracts import ImageSet, Mixer
from alignmixup.datasets.folder import FileSet
from alignmixup.device import pick_device
from alignmixup.experiments.batches import sample_images, side_of
from alignmixup.experiments.run_folder import ADAIN
from alignmixup.files import make_folder, writing
from alignmixup.mixers.stylecutmix import StyleCutMix
from alignmixup.mixers.stylemix import StyleMixer
from alignmixup.ops.adain import WeightsFile
from alignmixup.recipes.schema import Recipe
from alignmixup.training.adain_fit import OnStep, add_distances, fit_adain
from alignmixup.training.progress import Reporter

STYLE_IMAGES = 10_000
# For a run that names no weights.
ADAIN_STEPS = 4000
ADAIN_IMAGES = 5000


@dataclass(frozen=True)
class StyleWeights:
    """The file, and the quality of its network if it was trained here.

    ``psnr`` is that of its reconstructions in decibels; ``style_gap`` is the distance of a stylized
    image to its target style over that of the plain image.
    """

    weights: WeightsFile
    num_images: int
    psnr: float | None = None
    style_gap: float | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.weights.path}: {self.weights.kind} AdaIN network, {self.num_images} images",
            f"sha256 {self.weights.sha256}",
        ]
        if self.psnr is not None and self.style_gap is not None:
            lines.insert(
                1,
                f"reconstruction {self.psnr:.1f} dB; a stylized image keeps "
                f"{self.style_gap:.1%} of the distance to its style",
            )
        return "\n".join(lines)


def make_style_weights(
    dataset: str,
    out: Path | str,
    *,
    weights: str = "",
    steps: int = 4000,
    num_images: int = STYLE_IMAGES,
    width: int = 32,
    seed: int = 0,
    data_root: Path | str | None = None,
    device: str = "auto",
    on_step: OnStep | None = None,
) -> StyleWeights:
    """Train a style network on a data set's training images and write it to ``out``.

    With ``weights`` nothing is trained: they are written to ``out`` with the class distances of the
    data set. At most ``num_images`` images are used, equally many of each class.
    """
    path = Path(out)
    if path.suffix != ".safetensors":
        raise ValueError(f"out must be a .safetensors file, got {str(out)!r}")
    if path.exists():
        raise ValueError(f"{out} exists; choose another file, or remove it first")
    where = pick_device(device)
    images = some_images(dataset, num_images, seed, data_root)
    make_folder(path.parent)
    with writing(path):  # or the error of a read-only folder, before anything is trained
        path.open("ab").close()
        path.unlink()
    if weights:
        return StyleWeights(add_distances(weights, images, out, where), len(images))
    fit = fit_adain(images, out, steps, seed, where, width, on_step)
    return StyleWeights(fit.weights, len(images), fit.psnr, fit.style_gap)


def some_images(
    dataset: str, count: int, seed: int = 0, data_root: Path | str | None = None
) -> ImageSet:
    """Return at most ``count`` training images, in equal shares of all classes if there are more.

    Of sets with one file per image, no other file is decoded.
    """
    source = datasets.find(dataset)
    root = None if data_root is None else Path(data_root)
    whole = source.scan(root, "train") if source.scan else datasets.load(dataset, "train", root)
    if count < whole.num_classes:
        raise ValueError(
            f"{count} images are fewer than the {whole.num_classes} classes of {dataset}: each "
            "class needs one at least"
        )
    return sample_images(whole, count, source.image_size, seed)


@contextmanager
def shown_steps(*, quiet: bool = False) -> Iterator[OnStep]:
    """Show the steps of a fit on stderr: a bar on a terminal, elsewhere a line every tenth.

    Nothing is shown before the first step, so that an error comes alone.
    """
    with ExitStack() as stack:
        reporters: list[Reporter] = []

        def on_step(done: int, total: int) -> None:
            if not reporters:
                reporters.append(stack.enter_context(Reporter(total, quiet=quiet)))
            reporters[0].advance()
            if done % max(1, total // 10) == 0:
                reporters[0].epoch(f"style network: step {done} of {total}")

        yield on_step


def with_style_weights(
    recipe: Recipe,
    images: ImageSet | FileSet,
    folder: Path,
    device: torch.device,
    *,
    quiet: bool = True,
) -> Mixer:
    """Give a style mixer that names no weights a small network trained on these images.

    It is made once and kept in the run's folder; any other mixer comes back as it is. Its training
    takes minutes, which it shows unless ``quiet``.
    """
    mixer, seed = recipe.mixer, recipe.train.seed
    if not isinstance(mixer, StyleMixer) or mixer.weights:
        return mixer
    path = folder / ADAIN
    if not path.exists():
        needs_distances = isinstance(mixer, StyleCutMix) and mixer.gamma == "auto"
        some = _style_images(recipe, images)
        partial = path.with_name("partial-" + ADAIN)
        if not quiet:
            print(
                f"training a style network for {type(mixer).__name__} first, {ADAIN_STEPS:,} steps;"
                " 'alignmixup adain' makes one that several runs can use"
            )
        with shown_steps(quiet=quiet) as on_step:
            fit_adain(
                some,
                partial,
                ADAIN_STEPS,
                seed,
                device,
                on_step=on_step,
                class_distances=needs_distances,
            )
        os.replace(partial, path)
    return dataclasses.replace(mixer, weights=str(path))


def _style_images(recipe: Recipe, images: ImageSet | FileSet) -> ImageSet:
    """What a style network is trained on: a set in memory, or so many of its files."""
    if isinstance(images, ImageSet):
        return images
    count = max(ADAIN_IMAGES, images.num_classes)
    return sample_images(images, count, side_of(recipe.data, images), recipe.train.seed)
