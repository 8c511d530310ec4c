"""Where a figure's network and images come from, and images as figures want them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alignmixup import datasets, models
from alignmixup.contracts import ImageSet
from alignmixup.experiments.built_in import decoded_source
from alignmixup.experiments.decoding import align_settings, mixed_layer
from alignmixup.experiments.load import load_run
from alignmixup.experiments.painters import Painter
from alignmixup.experiments.run_folder import read_recipe
from alignmixup.experiments.scoring import run_images
from alignmixup.mixers.alignmixup import AlignMixup
from alignmixup.models.preact_resnet import HeadKind
from alignmixup.models.zoo import NetSpec, default_tap


@dataclass(frozen=True)
class Source:
    """A network, images, where and how to align; ``what`` names the network in a caption.

    ``painter`` decodes its features at ``layer``, where there is a decoder.
    """

    net: nn.Module
    layer: str
    images: ImageSet
    what: str
    eps: float = AlignMixup.eps
    num_iters: int = AlignMixup.num_iters
    painter: Painter | None = None


def network_source(
    run: Path | None, seed: int, data_root: Path | None, *, head: HeadKind = "flatten"
) -> Source:
    """The run's network and test images, or an untrained network and shapes."""
    if run is not None:
        return run_source(run, data_root)
    images = datasets.shapes("test")
    spec = NetSpec("preact_resnet18", width=8, head=head)
    size = images.images.shape[-1]
    net = models.build(spec, images.num_classes, images.mean, images.std, size, seed=seed)
    what = f"untrained PreActResNet-18, width 8, {head} head"
    return Source(net.eval(), default_tap(spec, net), images, what)


def run_source(run: Path, data_root: Path | None) -> Source:
    """A run's network and test images, with the layer and the settings it aligns with."""
    recipe = read_recipe(run)
    images = run_images(run, data_root)
    size = images.images.shape[-1]
    opened = load_run(run, num_classes=images.num_classes, image_size=size)
    what = f"run {recipe.name}, {opened.epoch} epoch{'' if opened.epoch == 1 else 's'}"
    return Source(opened.model, mixed_layer(opened), images, what, *align_settings(recipe.mixer))


def trained_source(out: Path, run: Path | None, seed: int, data_root: Path | None) -> Source:
    """The run's network, or the small one trained on shapes; with its decoder if it has one."""
    try:
        found = decoded_source(out, run, seed, data_root)
    except FileNotFoundError:
        if run is None:
            raise
        return run_source(run, data_root)
    net, layer, how = found.painter.net, found.painter.layer, (found.eps, found.num_iters)
    return Source(net, layer, found.images, found.what, *how, found.painter)


def different_pairs(images: ImageSet, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Up to ``count`` pairs of images of different classes, drawn without replacement."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=rng).tolist()
    pairs = [
        (i, j)
        for i, j in zip(order[::2], order[1::2], strict=False)
        if images.labels[i] != images.labels[j]
    ]
    if not pairs:
        raise ValueError(f"no two of the {len(images)} images drawn differ in class; take more")
    return pairs[:count]


def drawn(num_pairs: int, wanted: int) -> str:
    """Say in a caption how many pairs are shown, and that there are no more if that is why."""
    pairs = "One pair" if num_pairs == 1 else f"{num_pairs} pairs"
    fewer = f": the images make no {wanted} such pairs" if num_pairs < wanted else ""
    return f"{pairs} of different classes drawn at random{fewer}."


def floats(images: ImageSet, indices: list[int]) -> Float[Tensor, "b 3 h w"]:
    """These images as floats in [0, 1]."""
    return images.images[indices].float() / 255


def shown(image: Float[Tensor, "3 h w"]) -> NDArray[np.float32]:
    """An image as matplotlib wants it: rows, columns, colors."""
    picture: NDArray[np.float32] = image.detach().cpu().permute(1, 2, 0).numpy()
    return picture
