"""A recipe's data as batches: a set in memory, or one that is decoded from its files as it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from alignmixup import datasets
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.decode import decode_files
from alignmixup.datasets.loading.device_loader import Batch
from alignmixup.recipes.schema import DataSpec
from alignmixup.training.distributed import Team
from alignmixup.training.settings import TrainSettings

__all__ = ["eval_batches", "load_split", "sample_images", "side_of", "train_batches"]

# A batch of evaluation: small images by the thousand, streamed ones by what a GPU holds of them.
EVAL_BATCH = 2000
STREAMED_EVAL_BATCH = 256


def load_split(spec: DataSpec, split: str, root: Path | str | None) -> ImageSet | FileSet:
    """The split in memory, or its list of files where ``spec`` streams them."""
    source = datasets.find(spec.name)
    if spec.stream and source.scan is not None:
        return source.scan(None if root is None else Path(root), split)
    if not spec.stream:
        _check_used(spec)
    return datasets.load(spec.name, split, root)


def _check_used(spec: DataSpec) -> None:
    """Raise for a setting that would do nothing to a set in memory."""
    for setting in dataclasses.fields(spec):
        is_used = setting.name in ("name", "pad", "flip", "stream")
        if not is_used and getattr(spec, setting.name) != setting.default:
            raise ValueError(
                f"data.{setting.name}={getattr(spec, setting.name)} is for streamed files: set "
                "data.stream=True, or leave it out (the size of a folder is folder:PATH@SIZE)"
            )


def side_of(spec: DataSpec, images: ImageSet | FileSet) -> int:
    """The side of the images that the network is given."""
    if isinstance(images, ImageSet):
        return images.images.shape[-1]
    return spec.image_size or datasets.find(spec.name).image_size


def train_batches(
    spec: DataSpec,
    settings: TrainSettings,
    images: ImageSet | FileSet,
    device: torch.device,
    team: Team | None = None,
) -> datasets.DeviceLoader | datasets.StreamLoader:
    """Augmented batches of the training split, on the device.

    A streamed set gives the share of this process in each; of one in memory the engine takes it.
    """
    team = team or Team()
    share = team.share(settings.batch_size)
    # A graph holds one batch size, and each epoch leaves out other images.
    drop_last = len(images) >= settings.batch_size
    if team.size > 1 and not drop_last:
        raise ValueError(
            f"{len(images)} images make no full batch of {settings.batch_size} to share among "
            f"{team.size} processes: choose a smaller --train.batch-size"
        )
    if isinstance(images, ImageSet):
        return datasets.DeviceLoader(
            images,
            settings.batch_size,
            settings.seed,
            device,
            pad=spec.pad,
            flip=spec.flip,
            drop_last=drop_last,
            channels_last=_is_channels_last(settings, device),
        )
    return datasets.StreamLoader(
        images,
        settings.batch_size,
        side_of(spec, images),
        settings.seed,
        num_workers=None,
        device=device,
        area=spec.area,
        resize=spec.resize,
        squash=spec.squash,
        flip=spec.flip,
        jitter=spec.jitter,
        lighting=spec.lighting,
        drop_last=drop_last,
        channels_last=_is_channels_last(settings, device),
        share=share,
    )


def _is_channels_last(settings: TrainSettings, device: torch.device) -> bool:
    return settings.channels_last and device.type == "cuda"


def eval_batches(
    spec: DataSpec, settings: TrainSettings, images: ImageSet | FileSet, device: torch.device
) -> Iterable[Batch]:
    """Batches of the test split, in order, as often as they are iterated."""
    channels_last = _is_channels_last(settings, device)
    if isinstance(images, ImageSet):
        return datasets.eval_batches(images, EVAL_BATCH, device, channels_last=channels_last)
    loader = datasets.StreamLoader(
        images,
        STREAMED_EVAL_BATCH,
        side_of(spec, images),
        settings.seed,
        num_workers=None,
        device=device,
        is_train=False,
        resize=spec.eval_resize,
        squash=spec.squash,
        channels_last=channels_last,
    )
    return _Again(loader)


@dataclass(frozen=True)
class _Again:
    """The epoch of a loader that has no chance in it."""

    loader: datasets.StreamLoader

    def __iter__(self) -> Iterator[Batch]:
        return self.loader.epoch(0)


def sample_images(images: ImageSet | FileSet, count: int, side: int, seed: int) -> ImageSet:
    """At most ``count`` images in memory; where there are more, all classes get equal shares.

    Of sets with one file an image, no other file is decoded.
    """
    chosen = _equal_shares(images.labels, count, seed)
    if isinstance(images, ImageSet):
        pixels = images.images[chosen]
    else:
        pixels = decode_files([images.paths[i] for i in chosen.tolist()], side)
    return ImageSet(
        images.name,
        images.split,
        pixels,
        images.labels[chosen],
        images.class_names,
        images.mean,
        images.std,
    )


def _equal_shares(labels: Int[Tensor, " n"], count: int, seed: int) -> Int[Tensor, " m"]:
    """Up to ``count`` rows by chance: the first of every class, then the second, and so on."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=rng)
    by_class = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - first[labels[by_class]]
    return by_class[turn.argsort(stable=True)[:count]]
