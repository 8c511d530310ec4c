"""A recipe's data as batches: a set in memory, or one that is decoded from its files as it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from alignmixup import datasets
from alignmixup.contracts import ImageSet
from alignmixup.datasets.folder import FileSet
from alignmixup.datasets.loading.decode import decode_files
from alignmixup.datasets.loading.device_loader import Batch
from alignmixup.device import compute_for, tensors_on_cpu
from alignmixup.evaluation.forward import ALONE, PixelBatches
from alignmixup.evaluation.shares import Images, subset
from alignmixup.recipes.schema import DataSpec
from alignmixup.training.distributed import Team
from alignmixup.training.settings import TrainSettings

# A batch of evaluation: small images by the thousand, streamed ones by what a GPU holds of them.
EVAL_BATCH = 2000
STREAMED_EVAL_BATCH = 256


@tensors_on_cpu
def load_split(
    spec: DataSpec,
    split: str,
    root: Path | str | None,
    team: Team = ALONE,
    device: torch.device | str = "cpu",
) -> ImageSet | FileSet:
    """The split in memory, or its list of files where ``spec`` streams; at most ``spec.limit``.

    Rank 0 of ``team`` decodes images in memory and sends them to the others by ``device``. A list
    of files is read by every process.
    """
    source = datasets.find(spec.name)
    if spec.stream and source.scan is not None:
        with team.rank_zero_first():
            files: FileSet = source.scan(None if root is None else Path(root), split)
            return shortened(files, spec.limit)
    if not spec.stream:
        _check_used(spec)
    with team.guarded():
        own = None
        if team.is_rank_zero:
            own = shortened(datasets.load(spec.name, split, root), spec.limit)
        return _from_rank_zero(own, team, device)


def _from_rank_zero(own: ImageSet | None, team: Team, device: torch.device | str) -> ImageSet:
    """Return the set of rank 0 in every process: all but its pixels is pickled."""
    about = own
    if own is not None:
        about = dataclasses.replace(own, images=own.images.new_zeros(1).expand(own.images.shape))
    about = cast(ImageSet, team.from_rank_zero(about))
    if own is None:
        pixels = torch.empty(about.images.shape, dtype=torch.uint8)
    else:
        pixels = own.images.contiguous()
    team.share_bytes(pixels, device)
    return dataclasses.replace(about, images=pixels)


def shortened(images: Images, limit: int | None) -> Images:
    """At most ``limit`` images of a set, in their order, the same ones each time.

    All classes get equal shares, as far as they have so many.
    """
    if limit is None or len(images) <= limit:
        return images
    return subset(images, _equal_shares(images.labels, limit, seed=0).sort().values)


def check_batch_size(settings: TrainSettings, images: ImageSet | FileSet) -> None:
    """Raise where the images do not fill one batch: a step would be of fewer than recorded."""
    if len(images) < settings.batch_size:
        raise ValueError(
            f"{len(images)} training images make no full batch of {settings.batch_size}: set "
            f"--train.batch-size to {len(images)} or less"
        )


def _check_used(spec: DataSpec) -> None:
    """Raise for a setting that would do nothing to a set in memory."""
    for setting in dataclasses.fields(spec):
        is_used = setting.name in ("name", "pad", "flip", "stream", "limit")
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
    share = team.share(settings.batch_size, settings.accumulate)
    # A graph holds one batch size, and each epoch leaves out other images.
    drop_last = len(images) >= settings.batch_size
    if isinstance(images, ImageSet):
        return datasets.DeviceLoader(
            images,
            settings.batch_size,
            settings.seed,
            device,
            pad=spec.pad,
            flip=spec.flip,
            drop_last=drop_last,
            channels_last=compute_for(settings, device).channels_last,
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
        rand_augment=spec.rand_augment,
        erasing=spec.erasing,
        repeats=spec.repeats,
        drop_last=drop_last,
        channels_last=compute_for(settings, device).channels_last,
        share=share,
        on_error=spec.on_error,
        reduced=spec.reduced,
    )


def eval_batches(
    spec: DataSpec, settings: TrainSettings, images: ImageSet | FileSet, device: torch.device
) -> Iterable[Batch]:
    """Batches of the test split, in order, as often as they are iterated; a share may be empty."""
    if not len(images):
        return PixelBatches(lambda: iter(()))
    channels_last = compute_for(settings, device).channels_last
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
    return PixelBatches(partial(loader.epoch, 0))


def sample_images(images: ImageSet | FileSet, count: int, side: int, seed: int) -> ImageSet:
    """At most ``count`` images in memory; where there are more, all classes get equal shares.

    Of sets with one file an image, no other file is decoded.
    """
    chosen = _equal_shares(images.labels, count, seed)
    if isinstance(images, ImageSet):
        return subset(images, chosen)
    files = subset(images, chosen)
    return files.in_memory(decode_files(files.paths, side))


def _equal_shares(labels: Int[Tensor, " n"], count: int, seed: int) -> Int[Tensor, " m"]:
    """Up to ``count`` rows by chance: the first of every class, then the second, and so on."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=rng)
    by_class = order[labels[order].argsort(stable=True)]
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - first[labels[by_class]]
    return by_class[turn.argsort(stable=True)[:count]]
